//! A session: a loaded model, the sources of drafts, grammars, and the loop that all texts share.

pub mod decode;
pub mod draft;
pub mod grammar;
pub mod runtime;
