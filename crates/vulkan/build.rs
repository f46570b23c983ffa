//! Generates Rust from the committed SPIR-V: the list of shaders, and structs of their
//! specialisation constants and push constants. `src/device/pipeline.rs` and `src/lower/kernels.rs`
//! include it.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs};

const SPIRV: &str = "../../shaders/spirv";

/// Optional groups of constants: name of the struct, shaders (by prefix of the file name), constant
/// numbers. If the first constant is a boolean, it enables the group.
const OPTIONAL: [(&str, &str, &[u32]); 7] = [
    ("Heads", "linear", &[11, 12, 13, 26, 28]),
    ("NextNorm", "linear", &[20, 21, 22, 23, 24, 25]),
    ("PathTrellis", "linear", &[17, 19]),
    ("OfExperts", "linear", &[29]),
    ("SharedParts", "linear", &[30]),
    ("Join", "attention", &[7, 8, 9, 10, 11]),
    ("EmbedTrellis", "embed", &[9, 11]),
];

/// Longer names for constants with short names in the shaders.
const LONGER: [(&str, &str); 16] = [
    ("GQ", "group_heads"),
    ("GROUP_COLS", "group"),
    ("KK", "shape_k"),
    ("M", "rows"),
    ("MM", "shape_m"),
    ("N", "together"),
    ("NN", "shape_n"),
    ("NR", "matrix_rows"),
    ("NT", "tiles"),
    ("R", "rows"),
    ("RT", "matrix_tiles"),
    ("SG", "subgroup"),
    ("T", "threads"),
    ("U", "at_once"),
    ("W", "width"),
    ("WHOLE", "whole_images"),
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={SPIRV}");
    let entries = fs::read_dir(SPIRV).expect("the folder of the shaders");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let (mut shaders, mut kernels) = (String::new(), KernelMacros::default());
    for path in paths {
        let file = path.file_stem().and_then(|name| name.to_str()).unwrap();
        writeln!(shaders, "    {} {file:?},", camel(file)).unwrap();
        kernels.add(file, &Module::parse(&fs::read(&path).unwrap()));
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap());
    write(&out.join("shaders.rs"), format!("shaders! {{\n{shaders}}}\n"));
    write(&out.join("kernels.rs"), kernels.macros.into_values().collect());
}

fn write(path: &Path, text: String) {
    fs::write(path, text).expect("cargo's own folder");
}

fn camel(file: &str) -> String {
    let words = file.split('_').map(|word| word[..1].to_uppercase() + &word[1..]);
    words.collect()
}

/// Invocations of the macros in `src/lower/kernels.rs`.
#[derive(Default)]
struct KernelMacros {
    /// By the struct that each one declares.
    macros: BTreeMap<String, String>,
    /// Names of push constant structs, by their members. Shaders with equal members share a struct.
    blocks: HashMap<String, String>,
}

impl KernelMacros {
    fn add(&mut self, file: &str, module: &Module) {
        // Variants of a shader share its structs.
        let name = camel(file.strip_suffix("_k8").unwrap_or(file));
        let push = self.push(&name, module);
        let mut constants = module.constants();
        for (group, prefix, ids) in OPTIONAL {
            let is_first = |id: &&u32| file.starts_with(prefix) && constants.contains_key(id);
            if let Some(first) = ids.iter().find(is_first) {
                let (_, ty, default) = &constants[first];
                assert!(*ty != "bool" || *default == 0, "{file}: {group} is on by itself");
                let left = constants.clone();
                constants.retain(|id, _| !ids.contains(id));
                let of_group = left.into_iter().filter(|(id, _)| ids.contains(id));
                self.declare("constants", group, &fields(of_group.collect()));
            }
        }
        self.declare("constants", &name, &fields(constants));
        self.macros.insert(format!("{name} "), format!("kernel! {{ {name}, {push} }}\n"));
    }

    /// Declares the push constants of a shader. Returns the name of their struct.
    fn push(&mut self, name: &str, module: &Module) -> String {
        let members = self.members(module, module.push.expect("push constants")).0;
        let name = self.blocks.entry(members.clone()).or_insert(format!("{name}Push")).clone();
        self.declare("arguments", &name, &members);
        name
    }

    fn declare(&mut self, kind: &str, name: &str, fields: &str) {
        let text = format!("{kind}! {{ {name} {{ {fields}}} }}\n");
        let declared = self.macros.entry(name.to_owned()).or_insert_with(|| text.clone());
        assert_eq!(*declared, text, "shaders disagree");
    }

    /// Returns the fields of a struct, its bytes and its alignment. A last field `_gap` pads it to
    /// the alignment.
    fn members(&mut self, module: &Module, id: u32) -> (String, u32, u32) {
        let (mut fields, mut end, mut most) = (String::new(), 0, 4);
        for (at, name, member) in module.members(id, 0) {
            let (ty, bytes, align) = self.type_of(module, member);
            assert_eq!(at, end, "a gap before {name}");
            // GLSL reserves `out` and `step`, so the shaders write `out_` and `step_`.
            write!(fields, "{}: {ty}, ", name.trim_end_matches('_')).unwrap();
            (end, most) = (end + bytes, most.max(align));
        }
        if end % most != 0 {
            fields += "_gap: u32, ";
        }
        (fields, end.next_multiple_of(most), most)
    }

    /// Returns the name of a type, its bytes and its alignment. Addresses are 64-bit words.
    fn type_of(&mut self, module: &Module, id: u32) -> (String, u32, u32) {
        match (&module.types[&id].0, &module.types[&id].1[..]) {
            (&TYPE_INT, [32, _]) => ("u32".to_owned(), 4, 4),
            (&TYPE_FLOAT, [32, ..]) => ("f32".to_owned(), 4, 4),
            (&TYPE_INT, [64, _]) | (&TYPE_POINTER, _) => ("u64".to_owned(), 8, 8),
            (&TYPE_ARRAY, [element, length]) => {
                let (fields, bytes, align) = self.members(module, *element);
                let (name, length) = (&module.names[element], module.types[length].1[0]);
                assert_eq!(module.strides[&id], bytes, "gaps between elements of {name}");
                self.declare("arguments", name, &fields);
                (format!("[{name}; {length}]"), length * bytes, align)
            }
            other => panic!("push constants of the unknown type {other:?}"),
        }
    }
}

/// Specialisation constants by number: name, type, default.
type ConstantTable = BTreeMap<u32, (String, &'static str, u32)>;

fn fields(constants: ConstantTable) -> String {
    let field = |(id, (name, ty, _)): (u32, (String, &str, u32))| {
        let longer = LONGER.iter().find(|(short, _)| *short == name).map(|(_, name)| *name);
        format!("{id} {}: {ty}, ", longer.unwrap_or(&name.to_lowercase()))
    };
    constants.into_iter().map(field).collect()
}

// Opcodes, and the relevant decorations and storage class.
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

/// Instructions of a module that its caller needs, by result id.
#[derive(Default)]
struct Module {
    names: HashMap<u32, String>,
    member_names: HashMap<(u32, u32), String>,
    offsets: HashMap<(u32, u32), u32>,
    strides: HashMap<u32, u32>,
    spec_ids: Vec<(u32, u32)>,
    /// Type and default.
    spec_constants: HashMap<u32, (&'static str, u32)>,
    /// Opcode and operands of types, and of constants, which determine array lengths.
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
                (DECORATE, [id, SPEC_ID, n]) => m.spec_ids.push((*n, *id)),
                (DECORATE, [id, ARRAY_STRIDE, n]) => _ = m.strides.insert(*id, *n),
                (MEMBER_DECORATE, [id, i, OFFSET, n]) => _ = m.offsets.insert((*id, *i), *n),
                (SPEC_CONSTANT_TRUE, [_, id]) => _ = m.spec_constants.insert(*id, ("bool", 1)),
                (SPEC_CONSTANT_FALSE, [_, id]) => _ = m.spec_constants.insert(*id, ("bool", 0)),
                (SPEC_CONSTANT, [_, id, n]) => _ = m.spec_constants.insert(*id, ("u32", *n)),
                (CONSTANT, [_, id, n]) => _ = m.types.insert(*id, (opcode, vec![*n])),
                (TYPE_INT..=TYPE_POINTER, [id, rest @ ..]) => {
                    m.types.insert(*id, (opcode, rest.to_vec()));
                }
                (VARIABLE, [pointer, _, PUSH_CONSTANT]) => m.push = Some(m.types[pointer].1[1]),
                _ => {}
            }
        }
        m
    }

    /// Returns offset, name and type of the members of a struct at byte `at`. Nested structs are
    /// replaced by their members.
    fn members(&self, id: u32, at: u32) -> Vec<(u32, &str, u32)> {
        let each = self.types[&id].1.iter().zip(0..).flat_map(|(member, i)| {
            let at = at + self.offsets[&(id, i)];
            match self.types[member].0 {
                TYPE_STRUCT => self.members(*member, at),
                _ => vec![(at, self.member_names[&(id, i)].as_str(), *member)],
            }
        });
        each.collect()
    }

    fn constants(&self) -> ConstantTable {
        let mut constants = ConstantTable::new();
        for (number, id) in &self.spec_ids {
            let (ty, default) = self.spec_constants[id];
            let name = self.names.get(id).filter(|name| !name.is_empty());
            // The workgroup size occurs more than once, but has at most one name.
            let constant = constants.entry(*number).or_insert(("local".to_owned(), ty, default));
            assert!(name.is_none() || constant.0 == "local", "two constants have {number}");
            constant.0 = name.unwrap_or(&constant.0).clone();
        }
        constants
    }
}

/// Returns the literal string in `words`.
fn text(words: &[u32]) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    String::from_utf8(bytes.split(|b| *b == 0).next().unwrap().to_vec()).unwrap()
}
