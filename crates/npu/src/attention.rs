//! The operation `flash_partial` for whole layers.
//!
//! It writes sealed pages in the kernel's layout, divides the rows of a pass into jobs, and checks
//! their results.

use super::accel::{Bo, BoKind};
use super::host::{Core, HostModelAccel, HostModelOptions};
use super::layout::{
    self, ABI, Header, KernelShape, MAGIC, MAX_ROWS, OBJECT, PAIR, PAIRS, ResultView,
};
use super::session::{NpuSession, Slot};
use super::stream::Job;
use super::twin::Twin;
use anyhow::{Result, ensure};
use gemma_base::kv::PAGE;
use std::f32::consts::{LN_2, LOG2_E};

/// From this many jobs, the Rust twin recomputes one for comparison, beginning with the first job.
const CHECK_EVERY: u64 = 256;
/// Tolerance for the distance from the twin's result, as a relative L2 distance. A device may round
/// differently.
const NEAR: f64 = 0.02;

/// Dimensions of a model's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dims {
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    /// Factor of the attention scores.
    pub scale: f32,
}

impl Dims {
    fn group(&self) -> usize {
        self.n_heads / self.n_kv_heads
    }

    /// Returns the kernel's sizes for this model, or the reason why no kernel supports it.
    pub fn shape(&self) -> Result<KernelShape> {
        let shape = KernelShape::new(self.head_dim);
        let Some(shape) = shape else {
            anyhow::bail!(
                "the NPU kernel supports heads of 128 or 256 channels, not {}",
                self.head_dim
            )
        };
        ensure!(
            self.n_kv_heads <= PAIR * PAIRS,
            "the NPU has {} cores, the model {} kv heads",
            PAIR * PAIRS,
            self.n_kv_heads
        );
        ensure!(
            self.group() <= shape.rows(),
            "{} queries per kv head do not fit in a core",
            self.group()
        );
        Ok(shape)
    }

    pub fn pairs(&self) -> usize {
        self.n_kv_heads.div_ceil(PAIR)
    }
}

/// The sealed pages of one layer.
#[derive(Debug)]
pub struct SealedPages {
    bo: Bo,
    /// Number of pages that fit, and number of pages written.
    capacity: usize,
    pub sealed: usize,
    /// Largest absolute value of each kv head.
    largest: Vec<f32>,
}

/// Partial results of softmax attention over the NPU's pages, not yet divided by `l`.
#[derive(Clone, Debug, Default)]
pub struct Partials {
    pub m: Vec<f32>, // [rows, n_heads], in natural logarithms
    pub l: Vec<f32>, // [rows, n_heads]; 0 where the row saw nothing
    pub o: Vec<f32>, // [rows, n_heads, head_dim]
}

/// Counters of the work so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub jobs: u64,
    /// Pages that were written in the kernel's layout. A page has all heads of one layer.
    pub sealed: u64,
    /// Pages that jobs have read, and pairs of (row, page) for which they computed attention.
    pub pages: u64,
    pub row_pages: u64,
    /// Bytes of keys and values that jobs have read.
    pub bytes: u64,
    /// Jobs that the twin has recomputed.
    pub checks: u64,
}

/// A submitted job and its rows of the pass.
struct Flight {
    slot: usize,
    job: Job,
    first: usize,
    limits: Vec<usize>, // [rows], in pages
    bucket: usize,
    serial: u32,
    /// Number of the job since the start. It determines whether the twin checks the job.
    number: u64,
}

/// The operation `flash_partial` on a device.
pub struct FlashPartial {
    session: NpuSession,
    dims: Dims,
    shape: KernelShape,
    slots: Vec<Slot>,
    flights: Vec<Flight>,
    arena_in_flight: Option<(Bo, Vec<f32>, usize)>,
    serial: u32,
    pub counters: Counters,
}

impl FlashPartial {
    pub fn new(session: NpuSession, dims: Dims) -> Result<FlashPartial> {
        let shape = dims.shape()?;
        Ok(FlashPartial {
            session,
            dims,
            shape,
            slots: Vec::new(),
            flights: Vec::new(),
            arena_in_flight: None,
            serial: 0,
            counters: Counters::default(),
        })
    }

    /// Returns the operation on a dry device, which only counts its buffers, for plans. Refuses the
    /// models that a real device would refuse.
    pub fn dry(dims: Dims) -> Result<FlashPartial> {
        let accel =
            HostModelAccel::new(HostModelOptions { is_dry: true, ..HostModelOptions::default() });
        FlashPartial::new(
            NpuSession::open(Box::new(accel), &HostModelAccel::xclbin(dims.shape()?))?,
            dims,
        )
    }

    pub fn session(&self) -> &NpuSession {
        &self.session
    }

    pub fn shape(&self) -> KernelShape {
        self.shape
    }

    fn job(&self, arena: &SealedPages, pages: usize) -> Job {
        Job { shape: self.shape, pairs: self.dims.pairs(), capacity: arena.capacity, pages }
    }

    /// Allocates memory for `capacity` pages of a layer.
    pub fn arena(&mut self, capacity: usize) -> Result<SealedPages> {
        let bytes = self.dims.pairs() * capacity * self.shape.page_bytes();
        let bo = self.session.buffer(BoKind::Share, bytes)?;
        // The second core of a pair may have no head. It then reads zeros.
        self.session.publish(&bo, 0, bytes)?;
        Ok(SealedPages { bo, capacity, sealed: 0, largest: vec![0.0; self.dims.n_kv_heads] })
    }

    /// Allocates the buffers of all commands of a pass with `rows` rows.
    pub fn reserve(&mut self, rows: usize) -> Result<()> {
        let each = self.shape.rows() / self.dims.group();
        while self.slots.len() < rows.div_ceil(each) {
            let new = self.session.slot(self.shape, self.dims.pairs())?;
            self.slots.push(new);
        }
        Ok(())
    }

    pub fn release(&mut self, arena: SealedPages) {
        self.session.close(arena.bo);
    }

    /// Writes the next page: keys and values of all heads, `[n_kv_heads, PAGE, head_dim]`.
    pub fn seal(&mut self, arena: &mut SealedPages, keys: &[f32], values: &[f32]) -> Result<()> {
        let (page, size, head) = (arena.sealed, self.shape.page_bytes(), PAGE * self.dims.head_dim);
        ensure!(page < arena.capacity, "page {page} of {}", arena.capacity);
        ensure!(
            keys.len() == self.dims.n_kv_heads * head && values.len() == keys.len(),
            "a page of {} keys",
            keys.len()
        );
        ensure!(
            finite(keys) && finite(values),
            "page {page} holds a key or value that is not finite"
        );
        for h in 0..self.dims.n_kv_heads {
            let at = (h / PAIR * arena.capacity + page) * size;
            let (k, v) = (&keys[h * head..][..head], &values[h * head..][..head]);
            layout::write_page(
                self.shape,
                &mut self.session.bytes(&arena.bo)[at..at + size],
                h % PAIR,
                k,
                v,
            );
            arena.largest[h] = v.iter().fold(arena.largest[h], |m, v| m.max(v.abs()));
            if h % PAIR == PAIR - 1 || h + 1 == self.dims.n_kv_heads {
                self.session.publish(&arena.bo, at, size)?;
            }
        }
        arena.sealed += 1;
        self.counters.sealed += 1;
        Ok(())
    }

    /// Submits the rows of a pass. `q` is `[rows, n_heads, head_dim]`. `pages` has the number of
    /// pages that each row reads.
    pub fn submit(&mut self, arena: &SealedPages, q: &[f32], pages: &[usize]) -> Result<()> {
        ensure!(self.flights.is_empty(), "the last pass was not joined");
        ensure!(finite(q), "a query is not finite");
        ensure!(
            pages.iter().all(|p| *p <= arena.sealed),
            "{pages:?} pages of {} sealed",
            arena.sealed
        );
        let width = self.dims.n_heads * self.dims.head_dim;
        let each = self.shape.rows() / self.dims.group();
        self.arena_in_flight = Some((arena.bo, arena.largest.clone(), arena.capacity));
        for first in (0..pages.len()).step_by(each) {
            let limits = pages[first..(first + each).min(pages.len())].to_vec();
            let most = limits.iter().copied().max().unwrap_or(0);
            if most == 0 {
                continue;
            }
            let slot = self.flights.len();
            if slot == self.slots.len() {
                let new = self.session.slot(self.shape, self.dims.pairs())?;
                self.slots.push(new);
            }
            let job = self.job(arena, most);
            let bucket = self
                .shape
                .bucket(limits.len() * self.dims.group())
                .expect("a job's rows fit a core");
            self.serial = self.serial.wrapping_add(1).max(1);
            self.write_queries(slot, job, bucket, &q[first * width..], &limits);
            let number = self.counters.jobs;
            self.counters.jobs += 1;
            self.counters.pages += most as u64;
            self.counters.row_pages += limits.iter().sum::<usize>() as u64;
            self.counters.bytes += (most * self.shape.page_bytes() * self.dims.pairs()) as u64;
            self.flights.push(Flight {
                slot,
                job,
                first,
                limits,
                bucket,
                serial: self.serial,
                number,
            });
            self.session.submit(job, &arena.bo, &mut self.slots[slot])?;
        }
        Ok(())
    }

    /// Writes the headers and queries of all cores.
    fn write_queries(&mut self, slot: usize, job: Job, bucket: usize, q: &[f32], limits: &[usize]) {
        let Dims { n_heads, n_kv_heads, head_dim, scale } = self.dims;
        let (shape, group, tiles) = (self.shape, self.dims.group(), self.shape.tiles_per_page());
        let bytes = self.session.bytes(&self.slots[slot].queries);
        for core in 0..PAIR * job.pairs {
            let pair = &mut bytes[core / PAIR * shape.query_bytes()..][..shape.query_bytes()];
            let mut header = Header {
                shape,
                tiles: job.pages * tiles,
                rows: bucket,
                serial: self.serial,
                limits: [0; MAX_ROWS],
            };
            let queries = &mut pair[(PAIR + core % PAIR) * OBJECT..][..OBJECT];
            queries.fill(0);
            for (r, limit) in limits.iter().enumerate().filter(|_| core < n_kv_heads) {
                for g in 0..group {
                    header.limits[r * group + g] = (limit * tiles) as u32;
                    let at = (r * n_heads + core * group + g) * head_dim;
                    layout::write_query(
                        shape,
                        queries,
                        r * group + g,
                        &q[at..at + head_dim],
                        scale * LOG2_E,
                    );
                }
            }
            header.write(&mut pair[core % PAIR * OBJECT..][..OBJECT]);
        }
    }

    /// Waits for the pass and checks its results. Writes the partial results of its `rows` rows to
    /// `out`.
    pub fn join(&mut self, rows: usize, out: &mut Partials) -> Result<()> {
        let Dims { n_heads, n_kv_heads, head_dim, .. } = self.dims;
        out.m.clear();
        out.m.resize(rows * n_heads, f32::NEG_INFINITY);
        out.l.clear();
        out.l.resize(rows * n_heads, 0.0);
        out.o.clear();
        out.o.resize(rows * n_heads * head_dim, 0.0);
        let flights = std::mem::take(&mut self.flights);
        let Some((arena, largest, _)) = self.arena_in_flight.take() else { return Ok(()) };
        let group = self.dims.group();
        for flight in flights {
            self.session.finish(&mut self.slots[flight.slot])?;
            if flight.number.is_multiple_of(CHECK_EVERY) {
                self.compare(&flight, &arena)?;
                self.counters.checks += 1;
            }
            let (shape, size) = (self.shape, self.shape.out_bytes());
            let bytes = self.session.bytes(&self.slots[flight.slot].results);
            for core in 0..n_kv_heads {
                let result = ResultView::new(shape, &bytes[core * size..][..size]);
                let tiles = flight.job.pages * shape.tiles_per_page();
                let want = [MAGIC, ABI, tiles as u32, flight.bucket as u32, flight.serial];
                ensure!(
                    result.echo() == want,
                    "core {core} answered {:?}, not {want:?}",
                    result.echo()
                );
                for (r, limit) in flight.limits.iter().enumerate() {
                    for g in 0..group {
                        let (row, at) =
                            (r * group + g, (flight.first + r) * n_heads + core * group + g);
                        let (m, l) = (result.m(row), result.l(row));
                        if *limit == 0 {
                            ensure!(l == 0.0, "core {core} has a sum for a row without pages");
                            continue;
                        }
                        let keys = (limit * PAGE) as f32;
                        ensure!(
                            m.is_finite() && (0.99..=1.01 * keys).contains(&l),
                            "core {core}, row {row}: m {m}, l {l}"
                        );
                        let bound = 1.01 * l * largest[core] + f32::MIN_POSITIVE;
                        for d in 0..head_dim {
                            let o = result.o(row, d);
                            ensure!(
                                o.abs() <= bound,
                                "core {core}, row {row}: {o} is beyond {bound}"
                            );
                            out.o[at * head_dim + d] = o;
                        }
                        (out.m[at], out.l[at]) = (m * LN_2, l);
                    }
                }
            }
        }
        Ok(())
    }

    /// Recomputes the results of one core by the twin, because a device that reports COMPLETED may
    /// still be wrong.
    fn compare(&mut self, flight: &Flight, arena: &Bo) -> Result<()> {
        let (shape, core) =
            (self.shape, (flight.number / CHECK_EVERY) as usize % self.dims.n_kv_heads);
        let (pair, seat, size) = (core / PAIR, core % PAIR, self.shape.out_bytes());
        let mut twin = Twin::new(shape);
        let queries =
            &self.session.bytes(&self.slots[flight.slot].queries)[pair * shape.query_bytes()..];
        twin.begin(&queries[seat * OBJECT..][..OBJECT]);
        twin.query(&queries[(PAIR + seat) * OBJECT..][..OBJECT]);
        let pages = &self.session.bytes(arena)[pair * flight.job.capacity * shape.page_bytes()..];
        for object in pages[..flight.job.pages * shape.page_bytes()]
            .chunks_exact(OBJECT)
            .skip(seat)
            .step_by(PAIR)
        {
            twin.tile(object);
        }
        let mut want = vec![0; size];
        twin.end(&mut want);
        let got =
            self.session.bytes(&self.slots[flight.slot].results)[core * size..][..size].to_vec();
        let far = distance(
            ResultView::new(shape, &got),
            ResultView::new(shape, &want),
            flight.bucket,
            shape.head_dim,
        );
        ensure!(
            far <= NEAR,
            "core {core} is {:.1} % away from the result of the twin",
            100.0 * far
        );
        Ok(())
    }
}

/// Returns the largest relative L2 distance between the outputs of a row, after division by `l`.
fn distance(a: ResultView<'_>, b: ResultView<'_>, rows: usize, dim: usize) -> f64 {
    let value = |v: ResultView<'_>, r: usize, d: usize| {
        if v.l(r) > 0.0 { v.o(r, d) as f64 / v.l(r) as f64 } else { 0.0 }
    };
    let row_distance = |r: usize| {
        let (mut off, mut all) = (0.0, 1e-30);
        for d in 0..dim {
            let (a, b) = (value(a, r, d), value(b, r, d));
            off += (a - b) * (a - b);
            all += b * b;
        }
        if f64::is_finite(off) { (off / all).sqrt() } else { f64::INFINITY }
    };
    (0..rows).map(row_distance).fold(0.0, f64::max)
}

fn finite(values: &[f32]) -> bool {
    values.iter().all(|v| v.is_finite())
}
