//! From options to an opened model, a loaded target and its drafts.
//!
//! [`Session::open`] opens a model's files, [`Session::start`] loads them where they fit best,
//! knows what a pass costs and puts the drafter together. All commands that run a model go this
//! way. What the user should know is told to a [`Listener`]; this room prints nothing.

pub mod acquire;
pub mod answers;
pub mod backends;
pub mod calibration;
pub mod constraints;
pub mod costs;
pub mod drafting;
pub mod driver;
pub mod find;
pub mod listener;
pub mod load;
pub mod lock;
mod made_up;
pub mod model;
pub mod npu;
pub mod options;
pub mod partner;
pub mod placement;
pub mod processor;
pub mod session;
pub mod shapes;
#[cfg(test)]
pub mod testing;
pub mod trial;

pub use drafting::Drafting;
pub use listener::{Listener, Loading, Silence};
pub use load::Room;
pub use model::{Model, Size};
pub use options::{DraftingOptions, ModelOptions, RunOptions};
pub use session::{Session, Started};
