//! Progress of a conversion: a bar on a terminal, lines elsewhere, and a note at the first Ctrl-C.

use crate::cli::io::signals::Interrupt;
use crate::cli::io::ui::Ui;
use crate::cli::options::UiOptions;
use crate::quant::{QuantProgress, TensorPlan};
use crate::util::units::{bytes, duration};
use anyhow::Result;
use indicatif::ProgressBar;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Without a bar, a line is printed for each layer, and at this interval within a slow layer.
const SILENCE: Duration = Duration::from_secs(60);

/// State for a message at the first Ctrl-C: the bar on screen and the current tensor.
#[derive(Clone, Default)]
pub struct CurrentStage(Arc<Mutex<(Option<ProgressBar>, String)>>);

impl CurrentStage {
    /// Sets the bar on screen.
    pub fn show(&self, bar: &ProgressBar) {
        if let Ok(mut stage) = self.0.lock() {
            stage.0 = Some(bar.clone());
        }
    }

    /// Sets the current tensor; empty between tensors.
    pub fn begin(&self, tensor: &str) {
        if let Ok(mut stage) = self.0.lock() {
            tensor.clone_into(&mut stage.1);
        }
    }

    /// Makes the first Ctrl-C print a message at once.
    ///
    /// `whole` means that matrices are solved as a whole, not by rows. The thread ends after the
    /// message.
    pub fn watch(&self, options: &UiOptions, whole: bool) -> Result<(Interrupt, JoinHandle<()>)> {
        let (stage, options) = (self.clone(), options.clone());
        Interrupt::watch_saying(move || {
            let (bar, tensor) = stage.0.lock().map(|stage| stage.clone()).unwrap_or_default();
            let what = match (whole, tensor.as_str()) {
                (_, "") => "stopping at the next step; Ctrl-C again stops now".to_owned(),
                (true, name) => {
                    format!("finishing {name}; Ctrl-C again stops now (that tensor is redone)")
                }
                (false, _) => {
                    "stopping when the rows in work are done; Ctrl-C again stops now".to_owned()
                }
            };
            let say = || Ui::new(&options).note(what);
            match bar {
                Some(bar) => bar.suspend(say),
                None => say(),
            }
        })
    }
}

pub struct Meter<'a> {
    ui: &'a Ui,
    bar: ProgressBar,
    n_layers: usize,
    /// Tensors that an earlier run has finished and this run has not passed yet.
    resumed: usize,
    /// Weights of those tensors, and the time when the last of them was passed.
    found: u64,
    start: Instant,
    last_line: Instant,
    stage: &'a CurrentStage,
}

impl<'a> Meter<'a> {
    /// Starts the progress of `weights` weights.
    ///
    /// An earlier run has finished `resumed` of the tensors.
    pub fn new(
        ui: &'a Ui,
        stage: &'a CurrentStage,
        n_layers: usize,
        weights: u64,
        resumed: usize,
    ) -> Meter<'a> {
        let (bar, now) = (ui.percent_bar("quantising", weights), Instant::now());
        stage.show(&bar);
        Meter { ui, bar, n_layers, resumed, found: 0, start: now, last_line: now, stage }
    }

    pub fn hear(&mut self, p: &QuantProgress<'_>) {
        let Some(entry) = p.entry else {
            self.bar.set_message("verifying");
            return;
        };
        self.stage.begin(&entry.name);
        self.bar.set_position(p.done);
        self.bar.set_message(self.label(entry));
        // The estimate leaves out resumed tensors, because they took no time.
        if self.resumed > 0 {
            self.resumed -= 1;
            self.found = p.done;
            self.start = Instant::now();
            self.bar.reset_eta();
            return;
        }
        if let Some(error) = p.error {
            let target = entry.target;
            let error = if error > 0.0 {
                format!("relative error {error:.4}")
            } else {
                "copied".to_owned()
            };
            self.bar.suspend(|| {
                self.ui.detail(
                    1,
                    format!("{}: {target}, {}, {error}", entry.name, bytes(entry.bytes())),
                )
            });
        }
        let layer_done = p.error.is_some() && entry.ends_layer;
        if self.bar.is_hidden()
            && !self.ui.is_quiet()
            && (layer_done || self.last_line.elapsed() > SILENCE)
        {
            self.ui.line(&self.line(entry, p));
            self.last_line = Instant::now();
        }
    }

    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }

    /// Returns a label such as `layer 2/26 up_proj`.
    fn label(&self, entry: &TensorPlan) -> String {
        match entry.role.is_layer() {
            true => format!("layer {}/{} {}", entry.layer + 1, self.n_layers, entry.role.name()),
            false => entry.role.name().to_owned(),
        }
    }

    fn line(&self, entry: &TensorPlan, p: &QuantProgress<'_>) -> String {
        let (passed, fresh) = (self.start.elapsed().as_secs_f64(), p.done - self.found);
        let left = if fresh > 0 { passed * (p.total - p.done) as f64 / fresh as f64 } else { 0.0 };
        let left = if p.done < p.total {
            format!(", about {} left", duration(left))
        } else {
            String::new()
        };
        let percent = 100.0 * p.done as f64 / p.total.max(1) as f64;
        format!("{}: {percent:.0} % done after {}{left}", self.label(entry), duration(passed))
    }
}
