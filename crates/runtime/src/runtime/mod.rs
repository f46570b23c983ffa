//! From options to an opened model, a loaded target and its drafter.
//!
//! [`Session::open`] opens a model's files. [`Session::start`] loads them at the best place where
//! they fit, loads or measures the costs of a pass, and builds the drafter. All commands that run a
//! model use these functions. Notes for the user go to a [`Listener`]; this module prints nothing.

pub mod answers;
pub mod constraints;
pub mod devices;
pub mod drafting;
pub mod listener;
pub mod load;
pub mod model;
pub mod options;
pub mod placement;
pub mod session;
pub mod trial;

pub use drafting::Drafting;
pub use listener::{Listener, LoadingBar, Silence};
pub use load::Room;
pub use model::viewer::{SightOptions, Viewer};
pub use model::{Model, Size};
pub use options::{DraftingOptions, ModelOptions, RunOptions};
pub use session::{Session, Started};
