//! The dispatch list (`plan`), the executor interface, the CPU executor with its scalar twins, and
//! the executor that spreads a plan over two others (`split`). Knows no model.

pub mod act;
pub mod best;
pub mod cache;
pub mod cpu;
pub mod dense;
pub mod device;
pub mod dry;
pub mod executor;
pub mod memory;
pub mod op;
pub mod operand;
pub mod plan;
pub mod poison;
pub mod reference;
pub mod split;
pub mod step;
pub mod uses;

pub use act::{Act, ActFormat};
pub use cache::{KvFormat, KvLayer};
pub use dense::{DenseDevice, DenseNetwork};
pub use device::{Choice, DeviceInfo};
pub use executor::{
    AssistReport, Caps, Executor, ExecutorExt, Held, KernelTime, LoadJob, Loading, Report, Reports,
};
pub use op::{
    Attention, Best, Cap, Choose, Combine, Commit, Concat, Embed, ExpertWeights, Experts, GateUp,
    Linear, LinearJob, MAX_EXPERTS, MAX_USED, Norm, Op, PageRange, Prepare, Rope, RopeKeys,
};
pub use operand::{BufferId, RowSet, WeightId};
pub use plan::{Dispatch, Part, Plan, PlanId};
pub use step::StepLayout;
