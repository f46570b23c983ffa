//! The dispatch list (`plan`), the executor seam, the CPU executor with its scalar twins,
//! and the executor that spreads a plan over two others (`split`). Knows no model.

pub mod best;
pub mod cpu;
pub mod device;
pub mod dry;
pub mod executor;
pub mod memory;
pub mod op;
pub mod plan;
pub mod reference;
pub mod split;
pub mod step;
pub mod uses;

pub use device::{Choice, DeviceInfo};
pub use executor::{
    AssistReport, Caps, Executor, ExecutorExt, Held, KernelTime, LoadJob, Loading, Report, Reports,
    Storage,
};
pub use op::{
    Attention, Best, Commit, Embed, GateUp, Linear, LinearJob, Norm, Op, PageRange, Prepare, Rope,
};
pub use plan::{
    Act, ActFormat, BufferId, Dispatch, KvFormat, KvLayer, Part, Plan, PlanId, RowSet, WeightId,
};
pub use step::StepLayout;
