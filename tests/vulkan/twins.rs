//! Every Vulkan kernel compared with its scalar twin, at the edges of its pieces: rows, matrix
//! rows, columns, groups, heads, pages and windows.
//!
//! Each value is tested with each kernel. Not every combination is tested, since each costs the
//! driver a compilation. Each loop of a kernel runs twice or more in some case, with a shorter last
//! iteration: two superblocks, two heads, two pages.

use crate::common;
use common::twins::{
    HEADS, ROWS, SEQUENCES, Step, Twins, every_row_count, fill_scratch, format, layer,
};
use common::vulkan::device;
use gemma::compute::{
    Attention, Best, Cap, Commit, Concat, Embed, GateUp, KvFormat, KvLayer, Linear, Norm, Op,
    PageRange, Prepare, Rope, RopeKeys, RowSet,
};
use gemma::kv::OffloadedPages;
use gemma::tensor::Format;

/// Every code and every group. The numbers of rows select different kernels. These are the same for
/// every format except for decoding, so one format of each way to multiply tests all of them, and
/// the others test some.
const FORMATS: [(&str, &[usize]); 29] = [
    ("f32", &[2, 9]),
    ("bf16", &ROWS),
    ("i8-row", &[1, 5, 8, 33]),
    ("i8-g32", &[1, 3]),
    ("i8-g64", &[1]),
    ("i4-row", &[3, 16, 17]),
    ("i4-g32", &ROWS),
    ("i2-row", &[2, 8, 33]),
    ("i2-g128", &[1]),
    ("i8a-row", &[1, 9, 17]),
    ("t2-row", &[1, 16]),
    ("t2.5-row", &[2, 5]),
    ("t3-row", &[1, 3, 9, 33]),
    ("t4-row", &[8, 17]),
    ("q4_1", &[1, 9]),
    ("q5_0", &[2, 17]),
    ("q5_1", &[3]),
    ("q4_k", &ROWS),
    ("q5_k", &[1, 8]),
    ("q6_k", &[1, 5, 16, 33]),
    ("q2_k", &[1, 9]),
    ("q3_k", &[2, 16]),
    ("iq4_nl", &[1, 8]),
    ("iq4_xs", &[3, 9]),
    ("iq2_xxs", &[1, 9]),
    ("iq2_xs", &[2, 17]),
    ("iq2_s", &[1, 5, 33]),
    ("iq3_xxs", &[3, 8]),
    ("iq3_s", &[1, 16]),
];

/// Returns the numbers of columns near `cols` that a format can have.
fn allowed(format: Format, cols: usize) -> usize {
    (cols..).step_by(16).find(|c| format.check_cols(*c).is_ok()).unwrap()
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn linear_layers() {
    let Some(open) = device() else { return };
    for (i, (spelled, rows)) in FORMATS.into_iter().enumerate() {
        let exec = open();
        let mut t =
            Twins::new(if spelled == "t2-row" { exec.with_large_blocks() } else { exec }, i as u64);
        let f = format(spelled);
        // Matrix rows around the 16 of a workgroup and the tiles of 16. Columns that fill less than
        // a step, one step, and more than a round of lanes.
        let shapes = [(1, 16), (17, 48), (33, 128), (40, 640), (16, 1168), (3, 2176)];
        let jobs: Vec<_> =
            shapes.into_iter().map(|(n, cols)| t.job(f, n, allowed(f, cols))).collect();
        t.run(
            spelled,
            vec![Op::Linear(Linear { jobs: jobs.clone(), rows: RowSet::All })],
            every_row_count().filter(|s| rows.contains(&s.live)),
        );
        let selected = [1, 3, 8, 9].map(|selected| Step { live: 2, selected, ..Step::default() });
        // The kernels for selected rows differ from those for all rows only by a row's number, so a
        // few formats are enough.
        if ["bf16", "i4-g32", "t3-row"].contains(&spelled) {
            t.run(spelled, vec![Op::Linear(Linear { jobs, rows: RowSet::Selected })], selected);
        }
    }
}

/// Matrices as large as a vocabulary have a special kernel, and so have the rows of a prompt. Each
/// row is computed, including the last of a block.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn linear_layers_of_many_rows() {
    let Some(open) = device() else { return };
    let mut t = Twins::of_rows(open(), 1, 256);
    for (spelled, n, cols, lives) in [
        ("i8-row", 16384, 64, [7, 17]),
        ("i4-g32", 16389, 64, [7, 17]),
        // Two blocks of 128 rows if a device has matrix instructions.
        ("i8-row", 72, 1024, [65, 200]),
        ("i4-row", 72, 1024, [65, 200]),
        ("i4-g32", 72, 1024, [65, 128]),
        ("i2-row", 40, 1024, [65, 200]),
        ("t3-row", 48, 1024, [65, 200]),
        ("q4_k", 72, 1024, [65, 128]),
        ("q6_k", 72, 1024, [65, 128]),
        ("q5_0", 72, 1024, [65, 128]),
        // Parts of one step, of two and of three, also of steps of 64 and 128 columns.
        ("i4-g32", 136, 2432, [65, 128]),
        ("q2_k", 72, 2560, [65, 128]),
        ("q5_k", 72, 2560, [65, 128]),
        ("i8-g64", 72, 2176, [65, 128]),
        ("i4-g128", 72, 5376, [65, 128]),
        ("i2-g128", 72, 4096, [65, 128]),
        ("i2-g128", 40, 8448, [1, 17]),
        ("i4-g128", 40, 8448, [2, 9]),
    ] {
        let jobs = vec![t.job(format(spelled), n, cols)];
        t.run(
            spelled,
            vec![Op::Linear(Linear { jobs, rows: RowSet::All })],
            lives.map(|live| Step { live, ..Step::default() }),
        );
    }
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn embeddings() {
    let Some(open) = device() else { return };
    let mut t = Twins::new(open(), 2);
    let more = ["f32+h128", "i4-row+h128", "i8-g64+h128", "i8a-row+h128", "t2-row+h128"];
    for (i, spelled) in FORMATS.into_iter().map(|f| f.0).chain(more).enumerate() {
        let f = format(spelled);
        // Less than a block, and two superblocks or more. For some formats, more than a workgroup
        // handles at a time.
        for cols in [[16, 48, 640, 1168][i % 4], [304, 1168, 528, 5136][i / 4 % 4]] {
            let cols = allowed(f, cols);
            let (table, out) = (t.matrix(f, 37, cols), t.rows(cols));
            t.run(spelled, vec![Op::Embed(Embed { table, scale: 11.3, out })], every_row_count());
        }
    }
}

/// Norms alone, with an addition, and with the preparation of the next operation.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn norms_and_preparation() {
    let Some(open) = device() else { return };
    let mut t = Twins::new(open(), 3);
    // The width of a row, the next operation, and whether something is added first.
    for (dim, prepared, adds) in [
        (16, Some("i8-row"), false),
        (48, Some("i4-row"), true),
        (48, None, true),
        (128, Some("i8-g32"), true),
        (128, Some("bf16+h128"), false),
        (160, Some("i4-g32"), false),
        (192, Some("i2-g64"), true),
        (384, Some("i4-g128+h128"), true),
        (640, Some("f32+h128"), true),
        (768, Some("q6_k"), true),
        (1152, Some("i4-row+h128"), true),
        (1168, None, false),
        (5376, Some("t3-row+h128"), true),
        (5376, Some("i4-g32"), true),
    ] {
        for rows in if dim == 1152 { &[RowSet::All, RowSet::Selected][..] } else { &[RowSet::All] }
        {
            let (x, w, out) = (t.floats(dim), t.vector(dim), t.rows(dim));
            let add = adds.then(|| (t.floats(dim), t.vector(dim)));
            let mut ops =
                vec![Op::Norm(Norm { x, add, scale: 0.75, w, eps: 1e-6, dim, out, rows: *rows })];
            ops.extend(prepared.map(|f| {
                Op::Prepare(Prepare { input: out, act: t.act(format(f), dim), rows: *rows })
            }));
            let steps = every_row_count().map(|s| Step { selected: s.live, ..s });
            t.run(&format!("norm of {dim}, then {prepared:?}"), ops, steps);
        }
    }
    // Alone, and with rows that are zero. Several workgroups share a wide row.
    for (dim, spelled) in
        [(48, "i8-row"), (256, "i4-g32+h128"), (2304, "i4-g32+h128"), (2560, "q6_k")]
    {
        for input in [t.floats(dim), t.rows(dim)] {
            let act = t.act(format(spelled), dim);
            t.run(
                spelled,
                vec![Op::Prepare(Prepare { input, act, rows: RowSet::All })],
                every_row_count(),
            );
        }
    }
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn gates() {
    let Some(open) = device() else { return };
    let mut t = Twins::new(open(), 4);
    // Whether gate and up have the same activations: then they share a call.
    for (dim, ffn, spelled, prepared, shared) in [
        (48, 40, "i8-row", None, true),
        (64, 48, "t2-row", Some("i8-row"), false),
        (64, 256, "i4-g32", Some("i4-row+h128"), false),
        (64, 2304, "i4-g32", Some("i4-g32+h128"), true),
    ] {
        let (gate, up) = (t.job(format(spelled), ffn, dim), t.job(format(spelled), ffn, dim));
        let out = gate.out;
        let mut ops = vec![Op::GateUp(GateUp {
            act_gate: gate.act,
            gate: gate.weight,
            act_up: if shared { gate.act } else { up.act },
            up: up.weight,
            out,
        })];
        ops.extend(prepared.map(|f| {
            Op::Prepare(Prepare { input: out, act: t.act(format(f), ffn), rows: RowSet::All })
        }));
        t.run(spelled, ops, every_row_count());
    }
}

/// Committed positions: none, and around the edges of windows and pages.
const BASES: [usize; 7] = [0, 5, 69, 255, 256, 300, 770];

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn attention() {
    let Some(open) = device() else { return };
    for (i, (heads, rows)) in HEADS.into_iter().enumerate() {
        // Large blocks of narrow heads. Kernels for wide heads compile slowly.
        let exec = open();
        let mut t = Twins::new(if heads.0 == 16 { exec.with_large_blocks() } else { exec }, 5);
        let (dim, n_heads, ..) = heads;
        let kv = layer(&mut t, heads);
        let width = n_heads * dim;
        let (q, out) = (t.floats(width), t.rows(width));
        let mut ops = vec![Op::Attention(Attention {
            q,
            out,
            n_heads,
            scale: (dim as f32).powf(-0.5),
            kv,
            whole_images: false,
            range: PageRange::All,
        })];
        if i % 2 == 0 {
            let act = t.act(format("i8-row"), width);
            ops.push(Op::Prepare(Prepare { input: out, act, rows: RowSet::All }));
        }
        let steps = rows.iter().enumerate().flat_map(|(n, &live)| {
            let step = |base, tree| Step { live, first: n % 3, base, tree, ..Step::default() };
            let several =
                |base, tree| Step { live, base, tree, sequences: SEQUENCES, ..Step::default() };
            let one =
                [step(BASES[(n + i) % 7], n % 2 == 0), step(BASES[(n + i + 3) % 7], n % 2 == 1)];
            one.into_iter().chain((live > 1).then(|| several(BASES[(n + i + 1) % 7], n % 2 == 1)))
        });
        for step in steps {
            fill_scratch(&mut t, &kv, step);
            t.run(&format!("{heads:?}"), ops.clone(), [step]);
        }
    }
}

/// Windows of whole pages, like Gemma's. Rows of one block begin in two pages and end in two, so
/// the block has a page more than each of its rows.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn attention_of_rows_that_begin_in_two_pages() {
    let Some(open) = device() else { return };
    let heads = (32, 4, 2, KvFormat::F16, Some(256));
    let mut t = Twins::new(open().with_large_blocks(), 12);
    let (dim, n_heads, ..) = heads;
    let kv = layer(&mut t, heads);
    let (q, out) = (t.floats(n_heads * dim), t.rows(n_heads * dim));
    let (scale, whole_images, range) = (0.2, false, PageRange::All);
    let op = Op::Attention(Attention { q, out, n_heads, scale, kv, whole_images, range });
    for base in [505, 508, 511] {
        let step = Step { live: 9, base, ..Step::default() };
        fill_scratch(&mut t, &kv, step);
        t.run(&format!("{heads:?}"), vec![op.clone()], [step]);
    }
}

/// Attention with an NPU: over the pages that the NPU leaves, not divided.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn attention_over_the_rest() {
    let Some(open) = device() else { return };
    for (heads, _) in HEADS.into_iter().filter(|(heads, _)| heads.4.is_none() && heads.0 < 512) {
        let mut t = Twins::new(open(), 9);
        let (dim, n_heads, ..) = heads;
        let kv = layer(&mut t, heads);
        let (q, out) = (t.floats(n_heads * dim), t.rows(n_heads * (dim + 2)));
        let scale = (dim as f32).powf(-0.5);
        for (i, share) in [(0, 256), (1, 128), (2, 0)] {
            let range = PageRange::After(OffloadedPages { lag: t.layout.max_rows, share });
            let op =
                Op::Attention(Attention { q, out, n_heads, scale, kv, whole_images: false, range });
            for (live, base) in [(1, 5), (3, 300 + 7 * i), (9, 770)] {
                let step = Step { live, first: i, base, tree: i != 1, ..Step::default() };
                fill_scratch(&mut t, &kv, step);
                t.run(&format!("{heads:?}, share {share}"), vec![op.clone()], [step]);
            }
        }
    }
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn rotation_of_heads() {
    let Some(open) = device() else { return };
    for (heads, _) in HEADS {
        let mut t = Twins::new(open(), 6);
        let (dim, n_heads, n_kv, ..) = heads;
        let kv = layer(&mut t, heads);
        let [q, k, v] = [n_heads, n_kv, n_kv].map(|n| t.floats(n * dim));
        let (q_norm, k_norm, rope_table) = (t.vector(dim), t.vector(dim), t.floats(dim));
        let eps = 1e-6;
        for (i, step) in every_row_count().enumerate() {
            let v_norm = i % 2 == 1;
            let keys = Some(RopeKeys { k, v, k_norm, v_norm });
            let op = Rope { q, q_norm, keys, eps, n_heads, rope_table, kv };
            // They are rotated in place.
            for (id, n) in [q, k, v].into_iter().zip([n_heads, n_kv, n_kv]) {
                t.fill(id, t.layout.max_rows * n * dim);
            }
            t.run(&format!("{heads:?}"), vec![Op::Rope(op)], [step]);
        }
    }
}

/// With few rows, each of these is one call, and its workgroups do the work of the next dispatches
/// too. With more rows there is a call for each.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn dispatches_in_one_call() {
    let Some(open) = device() else { return };
    let steps = |live| {
        let step = |first, base, tree| Step { live, first, base, tree, ..Step::default() };
        [step(0, 300, false), step(live % 3, 770, true)]
    };
    // Rows and calls. Each is tested with two of three shapes, because each costs a processor's
    // driver several compilations.
    let heads = [
        ((128, 2, 1, KvFormat::F16, None), "i4-g32", &[(1, 1), (9, 1)][..]),
        ((32, 8, 2, KvFormat::F32, Some(70)), "f32", &[(1, 1), (3, 1), (33, 2)]),
        ((64, 4, 2, KvFormat::F16, Some(300)), "i8-g32", &[(3, 1), (9, 1), (33, 2)]),
        // One scale for the whole row.
        ((64, 4, 2, KvFormat::F32, None), "i8-row", &[(1, 1), (2, 1)]),
        ((32, 8, 2, KvFormat::F16, Some(70)), "i4-row+h128", &[(1, 1), (2, 1), (33, 2)]),
        ((64, 4, 2, KvFormat::F16, None), "nothing", &[(2, 1)]),
    ];
    for (h, prepared, rows) in heads {
        let mut t = Twins::new(open(), 11);
        let (dim, n_heads, n_kv, ..) = h;
        let kv = layer(&mut t, h);
        let mut jobs = [n_heads, n_kv, n_kv].map(|n| t.job(format("i4-g32"), n * dim, 96));
        let act = jobs[0].act;
        jobs.iter_mut().for_each(|job| job.act = act);
        let [q, k, v] = jobs.each_ref().map(|job| job.out);
        let (q_norm, k_norm, rope_table) = (t.vector(dim), t.vector(dim), t.floats(dim));
        let out = t.rows(n_heads * dim);
        let act = (prepared != "nothing").then(|| t.act(format(prepared), n_heads * dim));
        for &(live, calls) in rows {
            let linear = Op::Linear(Linear { jobs: jobs.to_vec(), rows: RowSet::All });
            let (eps, v_norm) = (1e-6, prepared == "i8-g32");
            let keys = Some(RopeKeys { k, v, k_norm, v_norm });
            let rope = Rope { q, q_norm, keys, eps, n_heads, rope_table, kv };
            let rope = Op::Rope(rope);
            t.run(&format!("{h:?}"), vec![linear, rope], steps(live));
            assert_eq!(t.exec.calls(), calls, "{h:?}: products and rotation, {live} rows");
            let attention = Op::Attention(Attention {
                q,
                out,
                n_heads,
                scale: (dim as f32).powf(-0.5),
                kv,
                whole_images: false,
                range: PageRange::All,
            });
            let mut ops = vec![attention];
            ops.extend(act.map(|act| Op::Prepare(Prepare { input: out, act, rows: RowSet::All })));
            t.run(&format!("{h:?}"), ops, steps(live));
            assert_eq!(t.exec.calls(), calls, "{h:?}: attention and preparation, {live} rows");
        }
    }
}

/// Queries, keys and values in formats that each need a separate call. Each call rotates its own
/// heads.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn rotation_by_several_calls() {
    let Some(open) = device() else { return };
    let h = (64, 4, 2, KvFormat::F16, None);
    for (formats, rows) in [
        (["i4-g32", "i8-g32", "i4-g32"], &[(1, 3), (9, 3)][..]),
        (["t2-row", "t2-row", "t3-row"], &[(2, 2)]),
        (["i4-row", "t3-row", "t3-row"], &[(1, 2), (33, 3)]),
        (["bf16"; 3], &[(1, 1), (9, 1)]),
    ] {
        let mut t = Twins::new(open(), 13);
        let (dim, n_heads, n_kv, ..) = h;
        let kv = layer(&mut t, h);
        let heads = [n_heads, n_kv, n_kv].into_iter().zip(formats);
        let mut jobs: Vec<_> = heads.map(|(n, f)| t.job(format(f), n * dim, 128)).collect();
        let act = jobs[0].act;
        jobs.iter_mut().for_each(|job| job.act = act);
        let [q, k, v] = [0, 1, 2].map(|i| jobs[i].out);
        let (q_norm, k_norm, rope_table) = (t.vector(dim), t.vector(dim), t.floats(dim));
        let (eps, v_norm) = (1e-6, formats[0] == "i4-row");
        let keys = Some(RopeKeys { k, v, k_norm, v_norm });
        let rope = Op::Rope(Rope { q, q_norm, keys, eps, n_heads, rope_table, kv });
        for &(live, calls) in rows {
            let steps = [0, live % 3].map(|first| Step { live, first, ..Step::default() });
            let linear = Op::Linear(Linear { jobs: jobs.clone(), rows: RowSet::All });
            t.run(&format!("{formats:?}"), vec![linear, rope.clone()], steps);
            assert_eq!(t.exec.calls(), calls, "{formats:?}, {live} rows");
        }
    }
}

/// With one row or two, the last workgroup of a linear layer computes the norm after it, and
/// prepares its result for one reader.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn norms_in_the_call_of_a_linear_layer() {
    let Some(open) = device() else { return };
    for (weights, dim, cols, prepared, rows) in [
        ("i4-g32", 640, 96, &["i4-g32"][..], &[(1, 1), (2, 2)][..]),
        ("t3-row", 1152, 192, &["t3-row+h128"], &[(1, 1), (3, 2)]),
        ("i8-row", 5376, 64, &["i8-row", "bf16+h128"], &[(1, 2), (5, 3)]),
        ("i2-g128", 48, 128, &[], &[(1, 1)]),
        ("bf16", 640, 96, &["bf16"], &[(1, 1), (2, 2)]),
    ] {
        let mut t = Twins::new(open(), 12);
        let job = t.job(format(weights), dim, cols);
        let (x, w, w_add, out) = (t.floats(dim), t.vector(dim), t.vector(dim), t.rows(dim));
        let norm = Op::Norm(Norm {
            x,
            add: Some((job.out, w_add)),
            scale: 0.75,
            w,
            eps: 1e-6,
            dim,
            out,
            rows: RowSet::All,
        });
        let mut ops = vec![Op::Linear(Linear { jobs: vec![job], rows: RowSet::All }), norm];
        ops.extend(prepared.iter().map(|f| {
            Op::Prepare(Prepare { input: out, act: t.act(format(f), dim), rows: RowSet::All })
        }));
        for &(live, calls) in rows {
            // The second step finds counters that the first one left.
            let steps = [0, live % 3].map(|first| Step { live, first, ..Step::default() });
            t.run(&format!("{weights}, norm, then {prepared:?}"), ops.clone(), steps);
            assert_eq!(t.exec.calls(), calls, "{weights}, norm, then {prepared:?}, {live} rows");
        }
    }
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn commits() {
    let Some(open) = device() else { return };
    // Layers of one shape share a call. A workgroup handles 64 channels at a time.
    for shapes in [
        &[(16, 2, KvFormat::F16)][..],
        &[(32, 2, KvFormat::F32)],
        &[(64, 2, KvFormat::Q8)],
        &[(144, 2, KvFormat::F16), (16, 3, KvFormat::F16)],
    ] {
        let mut t = Twins::new(open(), 7);
        let windows = [None, Some(256)].into_iter();
        let layers: Vec<KvLayer> = windows
            .flat_map(|window| shapes.iter().map(move |shape| (shape, window)))
            .map(|((dim, heads, kv), window)| layer(&mut t, (*dim, 0, *heads, *kv, window)))
            .collect();
        let steps = ROWS.into_iter().enumerate().map(|(n, path)| {
            let sequences = if n % 4 == 1 { SEQUENCES } else { 1 };
            let step = Step {
                live: 40,
                base: BASES[n % 7],
                tree: n % 3 == 0,
                path,
                sequences,
                ..Step::default()
            };
            if n % 2 == 0 { step } else { Step { base: 1020 - path, ..step } }
        });
        t.run("commit", vec![Op::Commit(Commit { layers })], steps.collect::<Vec<_>>());
    }
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn lists_of_the_best() {
    let Some(open) = device() else { return };
    let mut t = Twins::new(open(), 8);
    // The chunks of the last one have more logits than a workgroup has threads.
    for (vocab, usable, n_best) in
        [(257, 257, 1), (5003, 5000, 64), (100, 90, 256), (70_003, 70_001, 64)]
    {
        let (logits, maxima, lists) =
            (t.floats(vocab), t.rows(256), t.rows(gemma::compute::best::WORDS));
        let steps =
            [1, 3, 9].map(|selected| Step { live: 1, selected, n_best, usable, ..Step::default() });
        t.run(
            &format!("best of {vocab}"),
            vec![Op::Best(Best { logits, vocab, maxima, lists })],
            steps,
        );
    }
}

/// Rows of an assistant. Each is next to the row of its parent, which an earlier pass computed.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn rows_beside_their_parents() {
    let Some(open) = device() else { return };
    let mut t = Twins::new(open(), 10);
    let dim = 160;
    let (left, right, out) = (t.floats(dim), t.floats(dim), t.rows(2 * dim));
    let steps = ROWS.map(|live| Step { live, first: 4, tree: live % 2 == 1, ..Step::default() });
    t.run("concat", vec![Op::Concat(Concat { left, right, dim, out })], steps);
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn caps_of_logits() {
    let Some(open) = device() else { return };
    let mut t = Twins::new(open(), 9);
    let vocab = 1003;
    let logits = t.floats(vocab);
    let steps = [1, 4].map(|selected| Step { live: 1, selected, ..Step::default() });
    t.run("cap", vec![Op::Cap(Cap { logits, vocab, cap: 0.7 })], steps);
}
