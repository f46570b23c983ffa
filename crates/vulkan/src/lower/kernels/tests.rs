//! Holds the structs to the committed SPIR-V.

use super::*;
use std::collections::{BTreeMap, HashMap};

macro_rules! words {
    ($($ty:ty => $kind:expr),*) => {
        $(impl Field for $ty {
            fn list(name: &'static str, at: usize, out: &mut Vec<Member>) {
                out.push(Member { at, name, kind: $kind });
            }
        })*
    };
}

// Two halves of a word are one to the shaders.
words!(u32 => Kind::U32, [u16; 2] => Kind::U32, f32 => Kind::F32, u64 => Kind::Address);

/// Returns the arguments that a struct declares.
fn members<A: Field>() -> Vec<Member> {
    let mut list = Vec::new();
    A::list("", 0, &mut list);
    list
}

/// Declarations of a SPIR-V module for its caller.
#[derive(Default)]
struct Declared {
    /// Name, type and default of each specialisation constant, by number. `local_size_x` has no
    /// name.
    constants: BTreeMap<u32, (Option<String>, bool, u32)>,
    members: Vec<(usize, String, Kind)>,
}

// Opcodes, and the decorations and the storage class that matter here.
const NAME: u32 = 5;
const MEMBER_NAME: u32 = 6;
const TYPE_INT: u32 = 21;
const TYPE_FLOAT: u32 = 22;
const TYPE_ARRAY: u32 = 28;
const TYPE_STRUCT: u32 = 30;
const TYPE_POINTER: u32 = 32;
const CONSTANT: u32 = 43;
const SPEC_CONSTANT_TRUE: u32 = 48;
const SPEC_CONSTANT_FALSE: u32 = 49;
const SPEC_CONSTANT: u32 = 50;
const VARIABLE: u32 = 59;
const DECORATE: u32 = 71;
const MEMBER_DECORATE: u32 = 72;
const SPEC_ID: u32 = 1;
const ARRAY_STRIDE: u32 = 6;
const OFFSET: u32 = 35;
const PUSH_CONSTANT: u32 = 9;

/// Instructions of a module that concern its caller, by the id of their result.
#[derive(Default)]
struct Module {
    names: HashMap<u32, String>,
    member_names: HashMap<(u32, u32), String>,
    offsets: HashMap<(u32, u32), u32>,
    strides: HashMap<u32, u32>,
    spec_ids: HashMap<u32, u32>,
    /// Whether a constant is a boolean, and its default.
    spec_constants: HashMap<u32, (bool, u32)>,
    /// Opcode and operands of types, and of constants, which say how long arrays are.
    types: HashMap<u32, (u32, Vec<u32>)>,
    push: Option<u32>,
}

impl Module {
    fn parse(spirv: &[u8]) -> Module {
        let words: Vec<u32> = spirv.as_chunks().0.iter().map(|w| u32::from_le_bytes(*w)).collect();
        let mut m = Module::default();
        let mut at = 5;
        while at < words.len() {
            let (length, opcode) = (words[at] as usize >> 16, words[at] & 0xffff);
            let operands = &words[at + 1..at + length];
            at += length;
            match (opcode, operands) {
                (NAME, [id, name @ ..]) => _ = m.names.insert(*id, text(name)),
                (MEMBER_NAME, [id, i, name @ ..]) => {
                    m.member_names.insert((*id, *i), text(name));
                }
                (DECORATE, [id, SPEC_ID, n]) => _ = m.spec_ids.insert(*id, *n),
                (DECORATE, [id, ARRAY_STRIDE, n]) => _ = m.strides.insert(*id, *n),
                (MEMBER_DECORATE, [id, i, OFFSET, n]) => _ = m.offsets.insert((*id, *i), *n),
                (SPEC_CONSTANT_TRUE, [_, id]) => _ = m.spec_constants.insert(*id, (true, 1)),
                (SPEC_CONSTANT_FALSE, [_, id]) => _ = m.spec_constants.insert(*id, (true, 0)),
                (SPEC_CONSTANT, [_, id, n]) => _ = m.spec_constants.insert(*id, (false, *n)),
                (CONSTANT, [_, id, n]) => _ = m.types.insert(*id, (opcode, vec![*n])),
                (TYPE_INT..=TYPE_POINTER, [id, rest @ ..]) => {
                    m.types.insert(*id, (opcode, rest.to_vec()));
                }
                (VARIABLE, [pointer, _, PUSH_CONSTANT]) => {
                    assert_eq!(m.push.replace(m.types[pointer].1[1]), None, "one block at most");
                }
                _ => {}
            }
        }
        m
    }

    fn members(&self, id: u32, at: usize, out: &mut Vec<(usize, String, Kind)>) {
        for (i, member) in self.types[&id].1.iter().enumerate() {
            let at = at + self.offsets[&(id, i as u32)] as usize;
            let name = &self.member_names[&(id, i as u32)];
            let kind = match (&self.types[member].0, &self.types[member].1[..]) {
                (&TYPE_STRUCT, _) => {
                    self.members(*member, at, out);
                    continue;
                }
                (&TYPE_ARRAY, [element, length]) => {
                    for i in 0..self.types[length].1[0] {
                        let stride = self.strides[member] as usize;
                        self.members(*element, at + i as usize * stride, out);
                    }
                    continue;
                }
                (&TYPE_INT, [32, _]) => Kind::U32,
                (&TYPE_FLOAT, [32, ..]) => Kind::F32,
                (&TYPE_INT, [64, _]) | (&TYPE_POINTER, _) => Kind::Address,
                other => panic!("push constant `{name}` is of the unknown type {other:?}"),
            };
            out.push((at, name.trim_end_matches('_').to_owned(), kind));
        }
    }

    fn declared(&self) -> Declared {
        let mut declared = Declared::default();
        for (id, number) in &self.spec_ids {
            let (is_bool, default) = self.spec_constants[id];
            let name = self.names.get(id).filter(|n| !n.is_empty()).cloned();
            // The sizes of workgroups stand more than once, with a name once at most.
            let slot = declared.constants.entry(*number).or_insert((None, is_bool, default));
            assert!(slot.0.is_none() || name.is_none(), "two constants have the number {number}");
            slot.0 = slot.0.take().or(name);
        }
        if let Some(push) = self.push {
            self.members(push, 0, &mut declared.members);
        }
        declared
    }
}

/// A literal string of words.
fn text(words: &[u32]) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    String::from_utf8(bytes.split(|b| *b == 0).next().unwrap().to_vec()).unwrap()
}

/// Returns the differences between a kernel's structs and SPIR-V, in words.
fn differences(
    constants: &[Constant],
    options: &[&[Constant]],
    members: &[Member],
    spirv: &[u8],
) -> Vec<String> {
    let declared = Module::parse(spirv).declared();
    let mut wrong = Vec::new();
    let mut missing = declared.constants.clone();
    for c in constants.iter().chain(options.iter().copied().flatten()) {
        match missing.remove(&c.id) {
            None => wrong.push(format!("constant {} `{}` is not there, or is twice", c.id, c.name)),
            Some((name, is_bool, _)) => {
                let name = name.as_deref().unwrap_or("local_size_x");
                if (name, is_bool) != (c.name, c.is_bool) {
                    wrong.push(format!("constant {} is `{name}`, not `{}`", c.id, c.name));
                }
            }
        }
    }
    wrong.extend(missing.iter().map(|(id, (name, ..))| format!("constant {id} {name:?} is left")));
    // A group that a call does not add is off: its first constant is its switch, or the group
    // belongs to a format.
    for first in options.iter().map(|group| group[0]).filter(|first| first.is_bool) {
        if declared.constants.get(&first.id).is_some_and(|(_, _, default)| *default != 0) {
            wrong.push(format!("constant {} `{}` is on by itself", first.id, first.name));
        }
    }
    let mut members: Vec<_> = members.iter().map(|m| (m.at, m.name.to_owned(), m.kind)).collect();
    members.sort_by_key(|m| m.0);
    if members != declared.members {
        wrong.push(format!("arguments are {:?}, not {members:?}", declared.members));
    }
    wrong
}

/// Holds a kernel's structs to its SPIR-V and ticks the shader off.
fn check<K: Kernel<Push: Field>>(shader: Shader, left: &mut Vec<Shader>) {
    let wrong = differences(K::DECLARED, K::OPTIONS, &members::<K::Push>(), shader.code());
    assert!(wrong.is_empty(), "{}.comp: {wrong:#?}", shader.file());
    left.retain(|s| *s != shader);
}

#[test]
fn constants_and_arguments_are_those_of_the_shaders() {
    let mut left = Shader::ALL.to_vec();
    check::<LinearMatrix>(Shader::LinearMatrixK8, &mut left);
    macro_rules! each {
        ($($kernel:ty),*) => { $(check::<$kernel>(<$kernel>::SHADER, &mut left);)* };
    }
    each!(Attention, PartialAttention, Best, Cap, Commit, Concat, Embed, Linear, LinearFew);
    each!(LinearMany, LinearMatrix, LinearTrellis, MatrixProbe, Read, Repack, Rope, Row);
    each!(LinearFloat, Product, Viterbi);
    assert!(left.is_empty(), "nothing declares what {left:?} are given");
}

/// One wrong number, name, type or place is seen.
#[test]
fn what_a_shader_does_not_declare_is_seen() {
    let spirv = Shader::Rope.code();
    let (constants, members) = (Rope::DECLARED.to_vec(), members::<RopePush>());
    let wrong = |constants: &[Constant], members: &[Member]| {
        !differences(constants, &[], members, spirv).is_empty()
    };
    assert!(!wrong(&constants, &members));
    for i in 0..constants.len() {
        let with = |change: fn(&mut Constant)| {
            let mut changed = constants.clone();
            change(&mut changed[i]);
            wrong(&changed, &members)
        };
        assert!(with(|c| c.id += 1) && with(|c| c.id += 20));
        assert!(with(|c| c.name = "ANOTHER") && with(|c| c.is_bool = !c.is_bool));
        let mut fewer = constants.clone();
        fewer.remove(i);
        assert!(wrong(&fewer, &members));
    }
    for i in 0..members.len() {
        let with = |change: fn(&mut Member)| {
            let mut changed = members.clone();
            change(&mut changed[i]);
            wrong(&constants, &changed)
        };
        assert!(with(|m| m.at += 4) && with(|m| m.name = "another"));
        let other = if members[i].kind == Kind::U32 { Kind::F32 } else { Kind::U32 };
        let mut changed = members.clone();
        changed[i].kind = other;
        assert!(wrong(&constants, &changed));
        let mut fewer = members.clone();
        fewer.remove(i);
        assert!(wrong(&constants, &fewer));
    }
}
