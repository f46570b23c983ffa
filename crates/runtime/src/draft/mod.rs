//! Draft trees, which the target verifies. Drafts change the speed of a text, never its tokens.
//!
//! Once per round, the scheduler requests a [`Proposal`] from a [`Drafter`], and a [`Policy`]
//! decides how much of it the pass verifies. [`TreeBuilder`] is the drafter that uses all
//! [`sources`]; [`mix`] combines their probabilities. Start reading in [`drafter`].

pub mod builder;
pub mod costs;
pub mod drafter;
pub mod figures;
pub mod mix;
pub mod options;
pub mod policy;
pub mod proposal;
pub mod round;
pub mod sources;
pub mod verified;

pub use builder::{Mixing, TreeBuilder};
pub use costs::{CostCurve, Costs};
pub use drafter::{DraftContext, DraftRequest, Drafter, NoDraft};
pub use figures::{DraftFigures, Habits};
pub use options::{Ahead, DraftOptions, TreeSize};
pub use policy::Policy;
pub use proposal::Proposal;
pub use round::{Allowance, Pass, Round, RoundOutcome};
pub use sources::model::{DraftModel, TreeModel};
pub use sources::{CandidateSource, assistant::AssistantModel, grammar};
pub use verified::Verified;
