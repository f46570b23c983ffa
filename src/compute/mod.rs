//! Floor 1: the dispatch list (`plan`), the executor seam, and the CPU executor with its scalar twins. Knows no model.

pub mod best;
pub mod cpu;
pub mod executor;
pub mod memory;
pub mod plan;
pub mod reference;
pub mod step;

pub use executor::{Executor, KernelTime};
pub use plan::{Act, ActFormat, BufferId, Dispatch, KvFormat, KvLayer, LinearJob, Op, Plan, PlanId, RowSet, WeightId};
pub use step::StepLayout;
