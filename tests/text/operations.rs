//! Each operation of the CPU compared with its scalar twin, bit for bit, on every instruction set
//! of this machine. See `common::twins` for the inputs.

use crate::common::twins::{
    HEADS, SEQUENCES, Step, Twins, every_row_count, fill_scratch, format, layer,
};
use gemma::compute::cpu::{CpuExecutor, CpuOptions, Isa};
use gemma::compute::{
    Attention, Best, Cap, Commit, Concat, Embed, GateUp, KvFormat, Linear, Norm, Op, PageRange,
    Prepare, Rope, RopeKeys, RowSet,
};
use gemma::kv::OffloadedPages;
use gemma::tensor::Format;

const ALL: RowSet = RowSet::All;

/// Returns twins on each instruction set, with its name.
fn executors() -> impl Iterator<Item = (Twins<CpuExecutor>, String)> {
    Isa::all_supported().into_iter().map(|isa| {
        let options = CpuOptions { threads: 2, isa: Some(isa), check: true };
        (Twins::on(CpuExecutor::new(options).unwrap(), 31, 48), isa.to_string())
    })
}

fn lives(lives: [usize; 3]) -> [Step; 3] {
    lives.map(|live| Step { live, ..Step::default() })
}

#[test]
fn products() {
    for (mut t, isa) in executors() {
        for format in Format::all() {
            let cols = [512, 384, 32].into_iter().find(|cols| format.check_cols(*cols).is_ok());
            let jobs = vec![t.job(format, 40, cols.unwrap())];
            let ops = vec![Op::Linear(Linear { jobs, rows: ALL })];
            t.run(&format!("{format}, {isa}"), ops, lives([1, 5, 17]));
        }
        for (spelled, prepared) in [("i8-row", "i8-g32"), ("bf16", "i4-row+h128")] {
            let [gate, up] = [0; 2].map(|_| t.job(format(spelled), 256, 64));
            let (act_gate, act_up, out) = (gate.act, up.act, gate.out);
            let gates = GateUp { act_gate, gate: gate.weight, act_up, up: up.weight, out };
            let prepare = Prepare { input: out, act: t.act(format(prepared), 256), rows: ALL };
            let ops = vec![Op::GateUp(gates), Op::Prepare(prepare)];
            t.run(&format!("gates of {spelled}, {isa}"), ops, lives([1, 4, 17]));
        }
    }
}

#[test]
fn experts() {
    for (mut t, isa) in executors() {
        for (first, second, up, shape) in [
            ("i4-g32", "i4-g32", None, [5, 2, 96, 64]),
            ("q4_k", "q5_1", Some("q6_k"), [9, 3, 256, 32]),
            ("bf16", "f32", None, [4, 4, 32, 96]),
            ("t3-row", "i8-row", Some("bf16"), [3, 1, 128, 64]),
        ] {
            let ops = t.mixture([format(first), format(second)], up.map(format), shape);
            let steps = [1, 5, 17].map(|live| Step { live, first: live % 3, ..Step::default() });
            t.run(&format!("{first}, {second}, {isa}"), ops, steps);
        }
    }
}

#[test]
fn rows() {
    for (mut t, isa) in executors() {
        for (dim, prepared, adds) in [
            (48, "i8-row", true),
            (160, "i4-g32", false),
            (384, "i4-g128+h128", true),
            (640, "f32+h128", true),
            (768, "q6_k", true),
            (1152, "i4-row+h128", false),
        ] {
            let (x, w, out) = (t.floats(dim), t.vector(dim), t.rows(dim));
            let add = adds.then(|| (t.floats(dim), t.vector(dim)));
            let norm = Norm { x, add, scale: 0.75, w, eps: 1e-6, dim, out, rows: ALL };
            let act = t.act(format(prepared), dim);
            let prepare = |input| Op::Prepare(Prepare { input, act, rows: ALL });
            let what = format!("{dim}, then {prepared}, {isa}");
            t.run(&what, vec![Op::Norm(norm), prepare(out)], every_row_count());
            t.run(&what, vec![prepare(x)], every_row_count());
        }
        let table = t.matrix(format("i4-g32"), 37, 160);
        let (left, right) = (t.rows(160), t.floats(160));
        let out = t.rows(320);
        let embed = Op::Embed(Embed { table, scale: 11.3, out: left });
        let concat = Op::Concat(Concat { left, right, dim: 160, out });
        // Rows after those of an earlier pass. Each has a parent.
        t.run(&isa, vec![embed, concat], lives([1, 5, 17]).map(|step| Step { first: 4, ..step }));
    }
}

#[test]
fn logits() {
    for (mut t, isa) in executors() {
        let vocab = 1003;
        let logits = t.floats(vocab);
        let (maxima, lists) = (t.rows(256), t.rows(gemma::compute::best::WORDS));
        let ops = [
            Op::Cap(Cap { logits, vocab, cap: 0.7 }),
            Op::Best(Best { logits, vocab, maxima, lists }),
        ];
        for op in ops {
            let step = Step { live: 1, n_best: 5, usable: 1000, ..Step::default() };
            t.run(&isa, vec![op], [1, 4, 9].map(|selected| Step { selected, ..step }));
        }
    }
}

#[test]
fn heads() {
    let narrow = [
        (48, 2, 1, KvFormat::Q8, None),
        (256, 2, 1, KvFormat::Q8, Some(70)),
        (32, 2, 1, KvFormat::F16, Some(70)),
    ];
    for heads in HEADS.into_iter().map(|(heads, _)| heads).chain(narrow) {
        for (mut t, isa) in executors() {
            let (dim, n_heads, n_kv, format, window) = heads;
            let kv = layer(&mut t, heads);
            let what = format!("{heads:?}, {isa}");
            let [q, k, v] = [n_heads, n_kv, n_kv].map(|n| t.floats(n * dim));
            let (q_norm, k_norm, rope_table) = (t.vector(dim), t.vector(dim), t.floats(dim));
            for (live, v_norm) in [(1, false), (7, true), (17, false)] {
                let keys = Some(RopeKeys { k, v, k_norm, v_norm });
                let rope = Rope { q, q_norm, keys, eps: 1e-6, n_heads, rope_table, kv };
                t.run(&what, vec![Op::Rope(rope)], [Step { live, ..Step::default() }]);
            }
            let after = PageRange::After(OffloadedPages { lag: t.layout.max_rows, share: 128 });
            for range in [PageRange::All, after] {
                let is_partial = range != PageRange::All;
                if is_partial && (window.is_some() || format == KvFormat::F32) {
                    continue;
                }
                let out = t.rows(n_heads * (dim + 2 * is_partial as usize));
                let scale = (dim as f32).powf(-0.5);
                let op = Op::Attention(Attention {
                    q,
                    out,
                    n_heads,
                    scale,
                    kv,
                    whole_images: false,
                    range,
                });
                for (live, base, sequences) in [(1, 300, 1), (3, 69, 1), (9, 255, SEQUENCES)] {
                    let step = Step { live, base, tree: live == 3, sequences, ..Step::default() };
                    fill_scratch(&mut t, &kv, step);
                    t.run(&what, vec![op.clone()], [step]);
                }
            }
            let step = Step { live: 9, base: 250, path: 9, ..Step::default() };
            t.run(&what, vec![Op::Commit(Commit { layers: vec![kv] })], [step]);
        }
    }
}
