//! The NPU's kernel. Its C++ source, compiled for this processor with the host model of aie_api,
//! equals the Rust twin bit for bit, and both are close to exact arithmetic. Without a C++ compiler
//! the first part is skipped with a message; with GEMMA_REQUIRE_CXX=1, as in CI, it fails.

use super::library::Library;
use crate::fuzz;
use gemma::kv::PAGE;
use gemma::npu::accel::{Accel, BoKind};
use gemma::npu::attention::{Dims, FlashPartial, Partials, SealedPages};
use gemma::npu::command::Command as Packet;
use gemma::npu::host::array::{Array, Memory};
use gemma::npu::host::{Core, CoreMaker, HostModelAccel, HostModelOptions};
use gemma::npu::layout::{self, Header, KernelShape, MAX_ROWS, OBJECT, ResultView};
use gemma::npu::session::NpuSession;
use gemma::npu::stream::Job;
use gemma::npu::twin::Twin;
use gemma::npu::{txn, xclbin};
use half::bf16;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

/// Returns the kernel for both head dimensions; `None` if there is no compiler.
fn libraries(flags: &[&str]) -> Option<(tempfile::TempDir, Vec<Arc<Library>>)> {
    let room = Path::new(env!("CARGO_MANIFEST_DIR")).join("npu-kernels");
    let dir = tempfile::tempdir().unwrap();
    let mut list = Vec::new();
    for dim in [128, 256] {
        let out = dir.path().join(format!("flash_partial_{dim}.so"));
        let mut command = Command::new(std::env::var("CXX").unwrap_or_else(|_| "g++".into()));
        command.args([
            "-std=c++17",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-ffp-contract=off",
            "-fno-strict-aliasing",
            "-shared",
            "-fPIC",
        ]);
        command
            .args(["-Ihost", &format!("-DHEAD_DIM={dim}"), "flash_partial.cc", "-o"])
            .arg(&out)
            .args(flags);
        match command.current_dir(&room).output() {
            Ok(done) => assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr)),
            Err(why) => {
                assert!(std::env::var_os("GEMMA_REQUIRE_CXX").is_none(), "no C++ compiler: {why}");
                eprintln!("SKIPPED: no C++ compiler ({why}); set CXX or install g++");
                return None;
            }
        }
        list.push(Library::open(&out).unwrap());
    }
    Some((dir, list))
}

fn shapes() -> [KernelShape; 2] {
    [128, 256].map(|d| KernelShape::new(d).unwrap())
}

/// Returns nearly normal numbers with mean 0 and standard deviation 1.
fn draw(rng: &mut SmallRng, n: usize, size: f32) -> Vec<f32> {
    let one = |rng: &mut SmallRng| (0..4).map(|_| rng.random::<f32>()).sum::<f32>() - 2.0;
    (0..n).map(|_| bf16::from_f32(size * 3f32.sqrt() * one(rng)).to_f32()).collect()
}

/// Random keys and values, and the tiles that contain them.
struct Pages {
    keys: Vec<f32>,   // [n, head_dim]
    values: Vec<f32>, // [n, head_dim]
    tiles: usize,
    objects: Vec<u8>,
}

fn pages(shape: KernelShape, n: usize, seed: u64) -> Pages {
    let (mut rng, dim) = (SmallRng::seed_from_u64(seed), shape.head_dim);
    let (keys, values) = (draw(&mut rng, n * dim, 1.0), draw(&mut rng, n * dim, 1.0));
    let mut objects = Vec::new();
    // As the host writes them for a pair of cores. This core reads every second object.
    for (page, (k, v)) in
        keys.chunks_exact(PAGE * dim).zip(values.chunks_exact(PAGE * dim)).enumerate()
    {
        let mut bytes = vec![0; shape.page_bytes()];
        layout::write_page(shape, &mut bytes, page % 2, k, v);
        bytes.chunks_exact(OBJECT).skip(page % 2).step_by(2).for_each(|o| objects.extend(o));
    }
    Pages { tiles: n / shape.keys(), keys, values, objects }
}

/// A command of one core: a header, queries, tiles.
struct Case<'a> {
    pages: &'a Pages,
    q: Vec<f32>, // [rows, head_dim]
    limits: [u32; MAX_ROWS],
    objects: Vec<u8>,
}

/// Makes random queries for `rows` rows. `scale` is the approximate standard deviation of their
/// scores in powers of two.
fn case<'a>(
    shape: KernelShape,
    pages: &'a Pages,
    rows: usize,
    scale: f32,
    limits: impl Fn(usize) -> u32,
) -> Case<'a> {
    let (mut rng, dim) = (SmallRng::seed_from_u64(rows as u64 + 1), shape.head_dim);
    let q = draw(&mut rng, shape.rows() * dim, scale / (dim as f32).sqrt());
    let limits = std::array::from_fn(|r| if r < rows { limits(r) } else { 0 });
    let mut objects = vec![0; 2 * OBJECT];
    Header { shape, tiles: pages.tiles, rows, serial: 7, limits }.write(&mut objects[..OBJECT]);
    for r in 0..shape.rows() {
        layout::write_query(shape, &mut objects[OBJECT..], r, &q[r * dim..][..dim], 1.0);
    }
    objects.extend(&pages.objects);
    Case { pages, q, limits, objects }
}

fn run(shape: KernelShape, core: &mut dyn Core, objects: &[u8]) -> Vec<u8> {
    let mut list = objects.chunks_exact(OBJECT);
    let tiles = core.begin(list.next().unwrap());
    core.query(list.next().unwrap());
    assert_eq!(tiles, list.len());
    list.for_each(|o| core.tile(o));
    let mut out = vec![0; shape.out_bytes()];
    core.end(&mut out);
    out
}

/// Computes the attention of one query in f64: largest score, sum of exponentials, divided output.
fn exact(q: &[f32], keys: &[f32], values: &[f32]) -> (f64, f64, Vec<f64>) {
    let dim = q.len();
    let dot = |k: &[f32]| q.iter().zip(k).map(|(a, b)| *a as f64 * *b as f64).sum();
    let scores: Vec<f64> = keys.chunks_exact(dim).map(dot).collect();
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let (mut sum, mut out) = (0.0, vec![0f64; dim]);
    for (s, v) in scores.iter().zip(values.chunks_exact(dim)) {
        let e = (s - most).exp2();
        sum += e;
        out.iter_mut().zip(v).for_each(|(o, v)| *o += e * *v as f64);
    }
    out.iter_mut().for_each(|o| *o /= sum);
    (most, sum, out)
}

/// Returns the relative L2 distance.
fn apart(got: impl Iterator<Item = f64>, want: &[f64]) -> f64 {
    let (off, all) =
        got.zip(want).fold((0.0, 0.0), |(off, all), (g, w)| (off + (g - w) * (g - w), all + w * w));
    (off / all).sqrt()
}

/// Returns the largest relative L2 distance of a row from f64.
fn distance(shape: KernelShape, case: &Case<'_>, out: &[u8], rows: usize) -> f64 {
    let (view, dim, mut worst) = (ResultView::new(shape, out), shape.head_dim, 0f64);
    for r in 0..rows {
        let seen = case.limits[r] as usize * shape.keys() * dim;
        if seen == 0 {
            assert_eq!((view.l(r), view.m(r)), (0.0, layout::NONE));
            assert!((0..dim).all(|d| view.o(r, d) == 0.0));
            continue;
        }
        let (most, sum, want) =
            exact(&case.q[r * dim..][..dim], &case.pages.keys[..seen], &case.pages.values[..seen]);
        assert!(
            (view.m(r) as f64 - most).abs() <= 1e-4 * most.abs().max(1.0),
            "{} {most}",
            view.m(r)
        );
        assert!((view.l(r) as f64 / sum - 1.0).abs() < 3e-3, "l {} {sum}", view.l(r));
        worst = worst.max(apart((0..dim).map(|d| view.o(r, d) as f64 / view.l(r) as f64), &want));
    }
    worst
}

/// Returns row counts that one core handles. 32 rows of 256 channels are two jobs, see below.
fn row_counts(shape: KernelShape) -> impl Iterator<Item = usize> {
    [4, 16, 32].into_iter().filter(move |r| *r <= shape.rows())
}

/// Number of keys, 512 to 32k, and standard deviation of the scores, 1 to 20 in natural logarithms.
const CASES: [(usize, f32); 6] =
    [(512, 1.0), (512, 20.0), (4096, 4.0), (8192, 10.0), (32768, 1.0), (32768, 20.0)];

#[test]
fn the_twin_is_near_exact_arithmetic() {
    let mut worst = 0f64;
    for shape in shapes() {
        for (keys, scale) in CASES {
            let pages = pages(shape, keys, keys as u64);
            for rows in row_counts(shape) {
                let c = case(shape, &pages, rows, scale * std::f32::consts::LOG2_E, |_| {
                    pages.tiles as u32
                });
                let far = distance(shape, &c, &run(shape, &mut Twin::new(shape), &c.objects), rows);
                assert!(
                    far <= 0.003,
                    "{shape:?}, {rows} rows, {keys} keys, scores of {scale}: {far}"
                );
                worst = worst.max(far);
            }
        }
    }
    eprintln!("largest distance from exact arithmetic: {:.3} %", 100.0 * worst);
}

/// Returns cases in which rows see all tiles, some, one or none, and cases without rows or without
/// tiles.
fn odd_cases<'a>(shape: KernelShape, two: &'a Pages, none: &'a Pages) -> Vec<(Case<'a>, usize)> {
    let tiles = two.tiles as u32;
    let mut list = Vec::new();
    for rows in row_counts(shape) {
        list.push((
            case(shape, two, rows, 3.0, |r| [tiles, 0, 1, tiles / 2, tiles - 1][r % 5]),
            rows,
        ));
        list.push((case(shape, two, rows, 3.0, |_| 0), rows));
        list.push((case(shape, none, rows, 3.0, |_| 0), rows));
    }
    list.push((case(shape, two, 0, 3.0, |_| 0), 0));
    list
}

#[test]
fn masked_and_empty_headers() {
    for shape in shapes() {
        let (two, none) = (pages(shape, 2 * PAGE, 5), pages(shape, 0, 5));
        for (c, rows) in odd_cases(shape, &two, &none) {
            let far = distance(shape, &c, &run(shape, &mut Twin::new(shape), &c.objects), rows);
            assert!(far <= 0.003, "{far}");
        }
        // A row's result does not depend on what other rows see, nor on tiles that it does not see.
        let whole = case(shape, &two, 4, 3.0, |r| if r == 2 { 3 } else { 32 });
        let few = case(shape, &two, 4, 3.0, |r| if r == 2 { 3 } else { 0 });
        let [a, b] = [&whole, &few].map(|c| run(shape, &mut Twin::new(shape), &c.objects));
        let [a, b] = [&a, &b].map(|o| ResultView::new(shape, o));
        assert!((0..shape.head_dim).all(|d| a.o(2, d).to_bits() == b.o(2, d).to_bits()));
        assert_eq!((a.m(2).to_bits(), a.l(2).to_bits()), (b.m(2).to_bits(), b.l(2).to_bits()));
    }
}

#[test]
fn a_header_of_another_kernel_is_not_obeyed() {
    for shape in shapes() {
        let page = pages(shape, PAGE, 1);
        let good = case(shape, &page, 4, 1.0, |_| 1);
        for (at, value) in [(0, 1), (4, 9), (8, 64), (16, 5), (16, 33)] {
            let mut bad = good.objects.clone();
            bad[at] = value;
            let mut twin = Twin::new(shape);
            twin.begin(&bad[..OBJECT]);
            twin.query(&bad[OBJECT..2 * OBJECT]);
            bad[2 * OBJECT..].chunks_exact(OBJECT).for_each(|o| twin.tile(o));
            let mut out = vec![0; shape.out_bytes()];
            twin.end(&mut out);
            let view = ResultView::new(shape, &out);
            assert!(view.l(0) == 0.0 && view.echo()[4] == 0, "byte {at}");
        }
    }
}

#[test]
fn the_source_equals_the_twin_bit_for_bit() {
    let Some((_dir, libraries)) = libraries(&[]) else { return };
    for (shape, library) in shapes().into_iter().zip(&libraries) {
        assert_eq!(library.shape, shape);
        // The memory that design.py allocates for the state of a core.
        assert_eq!(
            library.state_bytes,
            (OBJECT + 3 * (shape.rows() / 4) * 64 + 16).next_multiple_of(32)
        );
        let mut core = library.core();
        let mut twin = Twin::new(shape);
        let mut compare = |c: &Case<'_>, what: &str| {
            let (a, b) = (run(shape, core.as_mut(), &c.objects), run(shape, &mut twin, &c.objects));
            let first = a.iter().zip(&b).position(|(a, b)| a != b);
            assert_eq!(first, None, "{shape:?}, {what}: byte differs");
        };
        let (two, none) = (pages(shape, 2 * PAGE, 6), pages(shape, 0, 6));
        for (c, rows) in odd_cases(shape, &two, &none) {
            compare(&c, &format!("{rows} rows, odd"));
        }
        for (keys, scale) in CASES {
            let pages = pages(shape, keys, 3);
            for rows in row_counts(shape).filter(|r| keys < 8192 || *r == 4) {
                compare(
                    &case(shape, &pages, rows, scale, |_| pages.tiles as u32),
                    &format!("{rows} rows, {keys} keys, {scale}"),
                );
            }
        }
    }
}

/// With the silicon's published model of sums, the kernel is as close to exact arithmetic.
#[test]
fn nine_term_sums_change_little() {
    let Some((_dir, libraries)) = libraries(&["-DAIE_NINE_TERMS"]) else { return };
    for (shape, library) in shapes().into_iter().zip(&libraries) {
        for (keys, scale) in [(512, 20.0), (8192, 1.0)] {
            let pages = pages(shape, keys, 8);
            let c = case(shape, &pages, 4, scale, |_| pages.tiles as u32);
            let out = run(shape, library.core().as_mut(), &c.objects);
            let far = distance(shape, &c, &out, 4);
            assert!(far <= 0.003, "{shape:?}, {keys} keys, scores of {scale}: {far}");
            assert_ne!(
                out,
                run(shape, &mut Twin::new(shape), &c.objects),
                "the flag does something"
            );
        }
    }
}

/// NaN and infinity do not reach the device.
fn refuses_what_is_not_finite(
    npu: &mut FlashPartial,
    arena: &mut SealedPages,
    q: &[f32],
    pages: &[usize],
) {
    let jobs = npu.counters.jobs;
    let is_said = |error: anyhow::Error| error.to_string().contains("not finite");
    for bad in [f32::NAN, f32::INFINITY] {
        let mut q = q.to_vec();
        q[77] = bad;
        assert!(is_said(npu.submit(arena, &q, pages).unwrap_err()));
        let mut k = vec![0.0; 3 * PAGE * (q.len() / (8 * 12))];
        k[5] = bad;
        let zeros = vec![0.0; k.len()];
        assert!(is_said(npu.seal(arena, &k, &zeros).unwrap_err()));
        assert!(npu.seal(arena, &zeros, &k).is_err());
    }
    assert_eq!(npu.counters.jobs, jobs);
}

/// The complete path, with the source in the cores: 32 query rows of either head dimension, an odd
/// number of heads.
#[test]
fn layers_go_through_stream_descriptors_and_kernel() {
    let libraries = libraries(&[]);
    for (i, shape) in shapes().into_iter().enumerate() {
        let dims = Dims { n_heads: 12, n_kv_heads: 3, head_dim: shape.head_dim, scale: 0.125 };
        let library = libraries.as_ref().map(|l| {
            let library = l.1[i].clone();
            Arc::new(move |_| library.core()) as CoreMaker
        });
        let mut partials = Vec::new();
        for (late, core) in [(false, library), (true, None)] {
            let options = HostModelOptions { core, late, ..HostModelOptions::default() };
            let accel = HostModelAccel::new(options);
            let open = accel.open_handles();
            let session =
                NpuSession::open(Box::new(accel), &HostModelAccel::xclbin(shape)).unwrap();
            let mut npu = FlashPartial::new(session, dims).unwrap();
            let mut rng = SmallRng::seed_from_u64(3);
            let mut draw = |n: usize| draw(&mut rng, n, 1.0);
            let mut arena = npu.arena(4).unwrap();
            // Keys and values of each head.
            let mut kept = vec![(Vec::new(), Vec::new()); 3];
            for _ in 0..3 {
                let (k, v) = (draw(3 * PAGE * shape.head_dim), draw(3 * PAGE * shape.head_dim));
                npu.seal(&mut arena, &k, &v).unwrap();
                for (h, (keys, values)) in kept.iter_mut().enumerate() {
                    keys.extend(&k[h * PAGE * shape.head_dim..][..PAGE * shape.head_dim]);
                    values.extend(&v[h * PAGE * shape.head_dim..][..PAGE * shape.head_dim]);
                }
            }
            // Eight rows of four heads: 32 query rows a kv head.
            let pages = [3, 3, 2, 0, 1, 3, 3, 3];
            let q = draw(8 * 12 * shape.head_dim);
            let mut out = Partials::default();
            npu.submit(&arena, &q, &pages).unwrap();
            npu.join(8, &mut out).unwrap();
            assert_eq!(npu.counters.jobs, (32 / shape.rows()) as u64);
            assert!(npu.counters.checks == 1 && npu.counters.row_pages == 18);
            assert!((0..8 * 12).all(|i| (out.l[i] == 0.0) == (pages[i / 12] == 0)));
            for (i, q) in
                q.chunks_exact(shape.head_dim).enumerate().filter(|(i, _)| pages[i / 12] > 0)
            {
                let q: Vec<f32> = q
                    .iter()
                    .map(|q| bf16::from_f32(q * (0.125 * std::f32::consts::LOG2_E)).to_f32())
                    .collect();
                let (seen, (keys, values)) =
                    (pages[i / 12] * PAGE * shape.head_dim, &kept[i % 12 / 4]);
                let (most, _, want) = exact(&q, &keys[..seen], &values[..seen]);
                let got = out.o[i * shape.head_dim..][..shape.head_dim]
                    .iter()
                    .map(|o| (o / out.l[i]) as f64);
                assert!(
                    apart(got, &want) <= 0.003
                        && (out.m[i] as f64 - most * std::f64::consts::LN_2).abs() < 1e-4,
                    "{i}"
                );
            }
            // One row alone gives the same bits.
            let (row, width) = (2, 12 * shape.head_dim);
            let mut one = Partials::default();
            npu.submit(&arena, &q[row * width..][..width], &pages[row..=row]).unwrap();
            npu.join(1, &mut one).unwrap();
            assert_eq!(one.o, out.o[row * width..][..width]);
            assert_eq!(
                (&one.m[..], &one.l[..]),
                (&out.m[row * 12..][..12], &out.l[row * 12..][..12])
            );
            refuses_what_is_not_finite(&mut npu, &mut arena, &q, &pages);
            assert_eq!(arena.sealed, 3);
            assert!(open.total() > 5);
            drop(npu);
            assert_eq!(open.total(), 0, "a handle is left");
            partials.push(out);
        }
        let [a, b] = &partials[..] else { unreachable!() };
        assert_eq!((&a.m, &a.l, &a.o), (&b.m, &b.l, &b.o), "late or at once, source or twin");
    }
}

/// The model enforces the driver's rules.
#[test]
fn the_model_refuses_what_the_driver_would() {
    let mut accel = HostModelAccel::new(HostModelOptions::default());
    let open = accel.open_handles();
    assert!(accel.create_bo(BoKind::Device, 4096).is_err(), "no heap yet");
    assert!(accel.create_context(16).is_err(), "no heap yet");
    assert!(
        accel.create_bo(BoKind::Heap, (64 << 20) + 4096).is_err()
            && accel.create_bo(BoKind::Share, 0).is_err()
    );
    let heap = accel.create_bo(BoKind::Heap, 64 << 20).unwrap();
    assert!(accel.create_bo(BoKind::Heap, 64 << 20).is_err(), "one heap a process");
    assert!(accel.create_bo(BoKind::Device, (64 << 20) + 1).is_err(), "beyond the heap");
    assert!(
        accel.create_context(15).is_err()
            && accel.create_context(20).is_err()
            && accel.create_context(0).is_err()
    );
    let contexts: Vec<u32> = (0..6).map(|_| accel.create_context(16).unwrap()).collect();
    assert_eq!(accel.create_context(16).unwrap_err().code, libc::ENOSPC, "six contexts");
    let share = accel.create_bo(BoKind::Share, 4096).unwrap();
    let image = accel.create_bo(BoKind::Device, 64).unwrap();
    assert!(
        accel.configure(contexts[0], &share, 0).is_err()
            && accel.configure(contexts[0], &image, 0).is_err()
    );
    let command = accel.create_bo(BoKind::Command, 4096).unwrap();
    assert!(
        accel.execute(contexts[0], &share, &[]).is_err()
            && accel.execute(99, &command, &[]).is_err()
    );
    assert!(
        accel.execute(contexts[0], &command, &[command.handle]).is_err()
            && accel.execute(contexts[0], &command, &[999]).is_err()
    );
    assert!(
        accel.wait(contexts[0], 1, std::time::Duration::ZERO).is_err(),
        "nothing was handed in"
    );
    // An empty packet is submitted and ends in ABORT.
    let number = accel.execute(contexts[0], &command, &[share.handle]).unwrap();
    accel.wait(contexts[0], number, std::time::Duration::ZERO).unwrap();
    assert_eq!(accel.bytes(&command)[0] & 15, 6);
    contexts.iter().for_each(|c| accel.destroy_context(*c));
    [heap, share, image, command].into_iter().for_each(|bo| accel.close_bo(bo));
    assert_eq!(open.total(), 0);
}

fn le_bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

fn le_words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

#[test]
fn fuzz_xclbin() {
    let model = |d| HostModelAccel::xclbin(KernelShape::new(d).unwrap());
    let long =
        xclbin::build(&xclbin::Partition { columns: 1, image: &[7; 5000], kernel_id: u64::MAX });
    let (_, accepted) =
        fuzz::run("xclbin", &[model(128), model(256), long], 30_000, &mut |bytes| {
            match xclbin::parse(bytes) {
                Ok(p) => {
                    // An accepted part is inside the file, and is the same after it is written
                    // again.
                    let again = xclbin::build(&p);
                    assert_eq!(xclbin::parse(&again).unwrap(), p);
                    bytes.as_ptr_range().contains(&p.image.as_ptr())
                }
                Err(_) => false,
            }
        });
    assert!(accepted > 0, "mutants that all are refused at once find nothing");
}

/// Memory of one page, at any address below a limit.
struct Small(Vec<u8>);

impl Memory for Small {
    fn read(&self, address: u64, bytes: usize) -> Option<&[u8]> {
        (address < 1 << 20).then_some(&self.0[..bytes])
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Option<()> {
        (address < 1 << 20 && bytes.len() <= self.0.len()).then_some(())
    }
}

/// Streams: decoding and encoding gives the same words, and a modelled array that runs one ends.
#[test]
fn fuzz_stream() {
    let shape = KernelShape::new(128).unwrap();
    let jobs = [(1, 1, 0), (1, 2, 1), (3, 9, 9), (8, 40, 33)].map(|(pairs, capacity, pages)| Job {
        shape,
        pairs,
        capacity,
        pages,
    });
    let seeds: Vec<Vec<u8>> = jobs.iter().map(|j| le_bytes(&j.stream().unwrap())).collect();
    let mut memory = Small(vec![0; txn::MAX_LENGTH]);
    let mut count = 0;
    let (_, accepted) = fuzz::run("stream", &seeds, 20_000, &mut |bytes| {
        // In every second mutant the header's byte count is corrected, so that the part after it is
        // parsed.
        let mut words = le_words(bytes);
        count += 1;
        if words.len() > 3 && count % 2 == 0 {
            words[3] = 4 * words.len() as u32;
        }
        let Ok((columns, ops)) = txn::decode(&words) else { return false };
        assert_eq!(txn::encode(columns, &ops).unwrap(), words);
        if ops.len() < 60 {
            let _ = Array::new(shape, &mut || Box::new(Twin::new(shape))).run(
                columns,
                &ops,
                &[0, 4096, 1 << 19],
                &mut memory,
            );
        }
        true
    });
    assert!(accepted > 0, "mutants that all are refused at once find nothing");
}

#[test]
fn fuzz_packet() {
    let command = |n| Packet { stream: 0x400_0000, words: 99, arguments: (0..n).collect() };
    let seeds = [2, 7].map(|n| le_bytes(&command(n).start_cu().unwrap()));
    let (_, accepted) =
        fuzz::run("packet", &seeds, 50_000, &mut |bytes| match Packet::decode(&le_words(bytes)) {
            Ok(c) => {
                assert_eq!(Packet::decode(&c.start_cu().unwrap()).unwrap(), c);
                true
            }
            Err(_) => false,
        });
    assert!(accepted > 0, "mutants that all are refused at once find nothing");
}
