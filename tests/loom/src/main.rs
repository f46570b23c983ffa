//! Model checking of code that threads share: `cargo run --release` in this folder.
//!
//! The modules under test are the program's own files, built with loom's types in place of the
//! standard library's (`util::sync`). Loom runs each model for every order of its threads' steps,
//! with a limited number of preemptions, and for every value that an atomic load may return under a
//! weak memory model. Timeouts never fire, so a missing wake causes a deadlock, which fails the
//! test. Other items that the files use are replaced by minimal versions (`stubs`).
//!
//! Arguments select models by name. Each model prints a line: executions and seconds.

#![allow(dead_code)]

mod fill;
mod queue;
mod shares;
mod stubs;
mod workers;

// The program's modules, at the program's paths.
use stubs::{decode, device, error, runtime, sync, tensor, util};
#[path = "."]
mod cli {
    pub use crate::stubs::cli::io;
    #[path = "."]
    pub mod api {
        pub use crate::stubs::api::error;
        #[path = "../../../src/cli/api/answer.rs"]
        pub mod answer;
    }
}
#[path = "."]
mod compute {
    #[path = "../../../crates/base/src/compute/cpu/pool.rs"]
    pub mod pool;
}
#[path = "."]
mod vulkan {
    #[path = "../../../crates/vulkan/src/run/fill.rs"]
    pub mod fill;
}
#[path = "."]
mod serve {
    #[path = "../../../src/cli/commands/serve/metrics.rs"]
    pub mod metrics;
    #[path = "../../../src/cli/commands/serve/pool.rs"]
    pub mod pool;
    #[path = "../../../src/cli/commands/serve/queue.rs"]
    pub mod queue;
}
// The server uses `tokio::sync::Notify` and `tokio::sync::mpsc::Sender`.
extern crate self as tokio;
// Files of other crates refer to this crate under this name.
extern crate self as gemma_base;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// A model, and the limit of preemptions in an execution.
struct Model {
    name: &'static str,
    preemptions: usize,
    run: fn(),
}

const MODELS: &[Model] = &[
    Model { name: "workers-two-runs", preemptions: 3, run: workers::two_runs },
    Model { name: "workers-two-callers", preemptions: 2, run: workers::two_callers },
    Model { name: "workers-barrier", preemptions: 3, run: workers::barrier },
    Model { name: "workers-three", preemptions: 1, run: workers::three },
    Model { name: "workers-panic", preemptions: 1, run: workers::panic },
    Model { name: "queue-shutdown", preemptions: 3, run: queue::shutdown },
    Model { name: "queue-bound", preemptions: 3, run: queue::bound },
    Model { name: "queue-gone", preemptions: 3, run: queue::gone },
    Model { name: "queue-failure", preemptions: 3, run: queue::failure },
    Model { name: "shares", preemptions: 3, run: shares::shares },
    Model { name: "fill-ring", preemptions: 2, run: fill::ring },
    Model { name: "fill-failure", preemptions: 2, run: fill::failure },
];

static EXECUTIONS: AtomicUsize = AtomicUsize::new(0);

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    for name in &wanted {
        assert!(MODELS.iter().any(|model| model.name == name), "there is no model {name}");
    }
    for model in MODELS.iter().filter(|m| wanted.is_empty() || wanted.iter().any(|w| w == m.name)) {
        let start = Instant::now();
        EXECUTIONS.store(0, Ordering::Relaxed);
        let mut check = loom::model::Builder::new();
        check.preemption_bound.get_or_insert(model.preemptions);
        let run = model.run;
        check.check(move || {
            EXECUTIONS.fetch_add(1, Ordering::Relaxed);
            run();
        });
        let executions = EXECUTIONS.load(Ordering::Relaxed);
        let seconds = start.elapsed().as_secs_f64();
        println!("{:20} {executions:>8} executions {seconds:>7.1} s", model.name);
    }
}
