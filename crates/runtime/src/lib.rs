//! A session: a loaded model, draft sources, grammars, and the generation loop of all texts.

pub mod decode;
pub mod draft;
pub mod grammar;
pub mod runtime;
