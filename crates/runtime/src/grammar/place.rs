//! Runs a grammar's machine: in a child process under limits, or in this process if child processes
//! are not required.

use super::GrammarSource;
use super::machine::{GrammarMachine, MachineState, StateQuery};
use super::vocabulary::GrammarVocabulary;
use anyhow::{Context, Result};
use gemma_base::error::{Fault, fault_of, no_limits, no_process};
use gemma_base::tensor::Token;
use gemma_base::util::child::{self, Child, ChildFailure, ChildLimits};
use gemma_model::sampler::Mask;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// Role of a child process that runs a machine.
pub const ROLE: &str = "--follow-grammar";

/// Memory limits of that child.
pub const LIMITS: ChildLimits = ChildLimits { memory: 256 << 20, stack: 64 << 20 };
/// Limits of processor time for compilation, and for one mask.
pub const COMPILING: Duration = Duration::from_secs(2);
const MASK: Duration = Duration::from_secs(1);

/// A message from the parent to its child.
#[derive(Serialize, Deserialize)]
enum ChildRequest {
    /// The first message. The vocabulary's words follow as raw bytes.
    Compile {
        source: GrammarSource,
        stops: Vec<Token>,
    },
    Answer {
        forgotten: Vec<u64>,
        ask: StateQuery,
    },
    /// Tokens of the text of an `Encode` message.
    Encoded(Vec<Token>),
}

/// A message from a child to its parent.
#[derive(Serialize, Deserialize)]
enum ChildReply {
    Compiled(Result<(), Fault>),
    /// The mask's words follow as raw bytes.
    State {
        number: Option<u64>,
        ends: bool,
        error: Option<String>,
        is_complete: bool,
        time: Duration,
    },
    /// A text to encode. Any number of these messages may precede the reply.
    Encode(String),
}

/// A running machine.
pub enum MachineHost {
    Here(Box<GrammarMachine>),
    Child(Child),
}

impl MachineHost {
    /// Starts a machine. A grammar that is invalid or exceeds the limits is a usage fault.
    pub fn start(
        source: &GrammarSource,
        vocabulary: &GrammarVocabulary,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<MachineHost> {
        if !child::is_required() {
            return Ok(MachineHost::Here(Box::new(GrammarMachine::compile(source, vocabulary)?)));
        }
        let mut child = Child::start(ROLE).with_context(no_process)?;
        let request =
            ChildRequest::Compile { source: source.clone(), stops: vocabulary.stops().into() };
        child.send(&request, &vocabulary.to_bytes());
        match receive(&mut child, vocabulary, is_wanted) {
            Ok((ChildReply::Compiled(Ok(())), _)) => Ok(MachineHost::Child(child)),
            Ok((ChildReply::Compiled(Err(fault)), _)) => Err(fault.into()),
            Ok(_) => Err(too_complex(source, ChildFailure::Failed).into()),
            Err(end) => Err(too_complex(source, end).into()),
        }
    }

    /// Sends a query to the machine. After an error the machine has ended.
    pub fn answer(
        &mut self,
        forgotten: Vec<u64>,
        ask: StateQuery,
        vocabulary: &GrammarVocabulary,
    ) -> Result<MachineState, ChildFailure> {
        let child = match self {
            MachineHost::Here(machine) => {
                machine.forget(&forgotten);
                return Ok(machine.answer(&ask));
            }
            MachineHost::Child(child) => child,
        };
        child.send(&ChildRequest::Answer { forgotten, ask }, &[]);
        let (reply, raw) = receive(child, vocabulary, &|| true)?;
        let ChildReply::State { number, ends, error, is_complete, time } = reply else {
            return Err(ChildFailure::Failed);
        };
        let (words, _) = raw.as_chunks();
        let words = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let mask = error.map_or_else(|| Ok(Mask::new(words, ends)), Err);
        Ok(MachineState { number, mask, is_complete, time })
    }
}

/// Waits for a child's reply. Encodes texts for the child while waiting.
fn receive(
    child: &mut Child,
    vocabulary: &GrammarVocabulary,
    is_wanted: &dyn Fn() -> bool,
) -> Result<(ChildReply, Vec<u8>), ChildFailure> {
    loop {
        match child.receive(is_wanted)? {
            (ChildReply::Encode(text), _) => {
                child.send(&ChildRequest::Encoded(vocabulary.encode(&text)), &[]);
            }
            reply => return Ok(reply),
        }
    }
}

/// Returns the fault of a grammar after its machine ended.
pub fn too_complex(source: &GrammarSource, end: ChildFailure) -> Fault {
    let name = source.name();
    if end == ChildFailure::Unlimited {
        return no_limits(&format!("the {name}"));
    }
    let what = match end {
        ChildFailure::Time => {
            format!("the {name} is too complex: it takes too much processor time")
        }
        ChildFailure::Memory => format!("the {name} is too complex: it takes too much memory"),
        ChildFailure::Unwanted => format!("the {name} is no longer needed"),
        ChildFailure::Failed | ChildFailure::Unlimited => {
            format!("the {name} cannot be used: the library that compiles it failed")
        }
    };
    Fault::usage(what).help("use fewer optional parts, repetitions and intersections")
}

/// Runs a machine for the parent process until the parent ends. Returns the exit code.
pub fn serve_parent() -> u8 {
    child::confined(LIMITS, || {
        let Some((ChildRequest::Compile { source, stops }, words)) = child::receive() else {
            return;
        };
        child::limit_time(COMPILING);
        let encode = |text: &str| {
            child::send(&ChildReply::Encode(text.to_owned()), &[]);
            match child::receive() {
                Some((ChildRequest::Encoded(tokens), _)) => tokens,
                _ => std::process::exit(1),
            }
        };
        let vocabulary = GrammarVocabulary::from_bytes(&words, stops, Arc::new(encode));
        let Some(vocabulary) = vocabulary else { return };
        let compiled = GrammarMachine::compile(&source, &vocabulary);
        child::limit_time(Duration::ZERO);
        let mut machine = match compiled {
            Ok(machine) => machine,
            Err(error) => {
                let other =
                    || Fault::usage(format!("the {} cannot be used: {error:#}", source.name()));
                let fault = fault_of(&error).cloned().unwrap_or_else(other);
                return child::send(&ChildReply::Compiled(Err(fault)), &[]);
            }
        };
        child::send(&ChildReply::Compiled(Ok(())), &[]);
        while let Some((ChildRequest::Answer { forgotten, ask }, _)) = child::receive() {
            child::limit_time(MASK);
            machine.forget(&forgotten);
            let MachineState { number, mask, is_complete, time } = machine.answer(&ask);
            child::limit_time(Duration::ZERO);
            let ends = mask.as_ref().is_ok_and(Mask::ends);
            let (words, error) = match &mask {
                Ok(mask) => {
                    (mask.words().iter().flat_map(|word| word.to_le_bytes()).collect(), None)
                }
                Err(error) => (Vec::new(), Some(error.clone())),
            };
            child::send(&ChildReply::State { number, ends, error, is_complete, time }, &words);
        }
    })
}
