//! A pool of engines for reuse, because opening a device takes longer than a text.

use anyhow::Result;
use gemma::compute::Reports;
use gemma::engine::{
    Assistant, Cached, Engine, EngineInfo, EngineReport, Input, Output, PageCopy, Prefix, Scores,
};
use std::sync::{Arc, Mutex};

type Pool = Arc<Mutex<Vec<Box<dyn Engine>>>>;

/// An engine that returns to the pool, emptied, when it is dropped.
struct Lent {
    engine: Option<Box<dyn Engine>>,
    pool: Pool,
}

/// Returns a function that lends engines. It calls `open` only if all engines are in use.
pub fn pooled(open: impl Fn() -> Box<dyn Engine>) -> impl Fn() -> Box<dyn Engine> {
    let pool = Pool::default();
    move || {
        let waiting = pool.lock().unwrap().pop();
        Box::new(Lent { engine: Some(waiting.unwrap_or_else(&open)), pool: pool.clone() })
    }
}

impl Lent {
    fn get(&self) -> &dyn Engine {
        &**self.engine.as_ref().unwrap()
    }
    fn get_mut(&mut self) -> &mut dyn Engine {
        &mut **self.engine.as_mut().unwrap()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut engine = self.engine.take().unwrap();
        engine.truncate(0, 0).unwrap();
        self.pool.lock().unwrap().push(engine);
    }
}

impl Engine for Lent {
    fn info(&self) -> &EngineInfo {
        self.get().info()
    }
    fn cached(&self, sequence: usize) -> Cached<'_> {
        self.get().cached(sequence)
    }
    fn begin(&mut self, inputs: &[Input<'_>], output: Output) -> Result<bool> {
        self.get_mut().begin(inputs, output)
    }
    fn finish(&mut self, out: &mut Scores) -> Result<()> {
        self.get_mut().finish(out)
    }
    fn is_busy(&self) -> bool {
        self.get().is_busy()
    }
    fn lend(&self, i: usize) -> Option<&[f32]> {
        self.get().lend(i)
    }
    fn commit(&mut self, paths: &[(usize, &[u32])]) -> Result<()> {
        self.get_mut().commit(paths)
    }
    fn truncate(&mut self, sequence: usize, position: usize) -> Result<()> {
        self.get_mut().truncate(sequence, position)
    }
    fn retain(&mut self, sequence: usize, tokens: usize) -> Option<Prefix> {
        self.get_mut().retain(sequence, tokens)
    }
    fn resume(&mut self, sequence: usize, prefix: &Prefix, tokens: usize) -> Result<()> {
        self.get_mut().resume(sequence, prefix, tokens)
    }
    fn copy_page(
        &mut self,
        prefix: &mut Prefix,
        layers: usize,
        nth: usize,
        copy: PageCopy<'_>,
    ) -> Result<bool> {
        self.get_mut().copy_page(prefix, layers, nth, copy)
    }
    fn report(&self) -> EngineReport {
        self.get().report()
    }
    fn device(&mut self) -> Option<&mut dyn Reports> {
        self.get_mut().device()
    }
    fn assistant(&mut self) -> Option<&mut dyn Assistant> {
        self.get_mut().assistant()
    }
}
