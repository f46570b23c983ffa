//! Costs of a target's passes on this machine, loaded before a run and saved after it.

use crate::draft::DraftFigures;
use crate::runtime::drafting::Drafting;
use crate::runtime::drafting::costs::{CostFile, Passes};
use crate::runtime::load::{Loaded, kv_format};
use crate::runtime::options::{DraftFrom, DraftingOptions, Kv};
use crate::runtime::{Listener, Model};
use anyhow::Result;

/// Costs of a target's passes, and the file that stores them.
pub struct Calibration {
    pub passes: Passes,
    file: CostFile,
}

impl Calibration {
    /// Loads the costs of an earlier run, or measures them. Does neither if drafting is off.
    pub fn of(
        model: &Model,
        kv: Kv,
        options: &DraftingOptions,
        loaded: &mut Loaded,
        listener: &dyn Listener,
    ) -> Result<Calibration> {
        let kv = kv_format(&model.weights, kv)?;
        let fingerprint = model.checkpoint().fingerprint()?;
        let file = CostFile::new(&fingerprint, &loaded.engine.report().device, &format!("{kv:?}"));
        if options.source == DraftFrom::Off {
            return Ok(Calibration { passes: Passes::unknown(), file });
        }
        let (passes, note) = Passes::kept_or_measured(loaded, &file)?;
        note.iter().for_each(|note| listener.detail(1, note));
        Ok(Calibration { passes, file })
    }

    /// Saves the measured costs for the next run. If that fails, only reports a note.
    pub fn keep(self, drafting: &Drafting, listener: &dyn Listener) -> DraftFigures {
        let figures = drafting.figures();
        self.save(&drafting.identity, &figures, listener);
        figures
    }

    fn save(self, identity: &str, figures: &DraftFigures, listener: &dyn Listener) {
        if let Err(why) = self.file.save(self.passes, identity, figures) {
            listener.detail(1, &format!("the costs of passes were not saved: {why:#}"));
        }
    }
}
