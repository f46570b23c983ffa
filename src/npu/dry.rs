//! A device that computes nothing and whose buffers are only counted, for plans: what is asked of
//! it is what a run would ask.

use super::accel::{Accel, Bo, BoKind, Errno, Info, Outcome, Sync};
use super::attention::{Dims, FlashPartial};
use super::host::{HostModelAccel, ModelOptions};
use super::session::Session;
use anyhow::Result;
use std::collections::HashMap;
use std::time::Duration;

/// The operation on a device that only counts. Refuses the models that a device would refuse.
pub fn flash_partial(dims: Dims) -> Result<FlashPartial> {
    let session =
        Session::open(Box::<DryAccel>::default(), &HostModelAccel::xclbin(dims.shape()?))?;
    FlashPartial::new(session, dims)
}

#[derive(Default)]
struct DryAccel {
    made: u32,
    /// Contents of the few small buffers that the host writes while it brings a device up.
    written: HashMap<u32, Vec<u8>>,
}

impl Accel for DryAccel {
    fn describe(&self) -> String {
        "nothing at all".into()
    }

    fn is_real_device(&self) -> bool {
        false
    }

    fn info(&mut self) -> Outcome<Info> {
        HostModelAccel::new(ModelOptions::default()).info()
    }

    fn create_bo(&mut self, kind: BoKind, bytes: usize) -> Outcome<Bo> {
        self.made += 1;
        Ok(Bo { handle: self.made, kind, bytes, address: 0 })
    }

    fn close_bo(&mut self, bo: Bo) {
        self.written.remove(&bo.handle);
    }

    fn bytes(&mut self, bo: &Bo) -> &mut [u8] {
        self.written.entry(bo.handle).or_insert_with(|| vec![0; bo.bytes])
    }

    fn sync(&mut self, _: &Bo, _: Sync, _: usize, _: usize) -> Outcome<()> {
        Ok(())
    }

    fn create_context(&mut self, _: u32) -> Outcome<u32> {
        Ok(1)
    }

    fn configure(&mut self, _: u32, _: &Bo, _: u8) -> Outcome<()> {
        Ok(())
    }

    fn destroy_context(&mut self, _: u32) {}

    fn execute(&mut self, _: u32, _: &Bo, _: &[u32]) -> Outcome<u64> {
        Err(Errno::new(libc::ENODEV, "a dry device has nothing to run"))
    }

    fn wait(&mut self, _: u32, _: u64, _: Duration) -> Outcome<()> {
        Err(Errno::new(libc::ENODEV, "a dry device has nothing to run"))
    }
}
