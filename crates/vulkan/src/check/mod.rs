//! `--check`: after each kernel call, the scalar twin runs on the same inputs. The first output
//! that exceeds its tolerance is an error.
//!
//! Calls run one by one, but fused as in a recorded plan. A mirror on the host holds the content of
//! the device's buffers. The twins run on the mirror, and their outputs are compared with the
//! device's. The mirror then copies the device's numbers, so that differences do not accumulate and
//! a run generates the same text as an unchecked one. Before a call, its outputs and scratch memory
//! are poisoned on both sides. This reveals elements that are left out or read too early.

mod compare;
mod outputs;

use crate::lower::{Bucket, Call};
use crate::run::VulkanExecutor;
use anyhow::{Result, bail, ensure};
use compare::{
    Difference, OutputLayout, Rule, first_difference, first_q8_difference, first_wrong_code, typed,
};
use gemma_base::compute::memory::Buffers;
use gemma_base::compute::poison::{self, Computed};
use gemma_base::compute::step::StepView;
use gemma_base::compute::{
    BufferId, Caps, Dispatch, Executor, Experts, KvFormat, Linear, LoadJob, Op, Part, Plan, PlanId,
    Report, Reports, RowSet, StepLayout, WeightId, best, reference,
};
use gemma_base::tensor::Matrix;
use gemma_base::testing;
use outputs::{CheckedOutput, Content, outputs, right_scales, unrounded};
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// Fault for tests: changes a word of a kernel's output before the comparison.
#[derive(Clone, Copy, Debug)]
pub struct InjectedFault {
    /// Index of the dispatch in the plan.
    pub dispatch: usize,
    /// Index of its output.
    pub output: usize,
    pub word: usize,
    /// Bits to flip.
    pub mask: u32,
}

/// A Vulkan executor that checks every result.
pub struct CheckedExecutor {
    gpu: VulkanExecutor,
    mirror: Buffers,
    /// Labels of the mirrored buffers. The device has its own buffers in between.
    labels: HashMap<BufferId, String>,
    /// Number of buffers in the mirror, including the device's own.
    count: u32,
    /// Outputs of skipped dispatches, which no later dispatch may read.
    stale: HashSet<BufferId>,
    canonical: Vec<Matrix<'static>>,
    plans: Vec<CheckedPlan>,
    /// Number of kernel calls of the last run.
    calls: usize,
    fault: Option<InjectedFault>,
}

#[derive(Clone)]
struct CheckedPlan {
    dispatches: Vec<Dispatch>,
    step: BufferId,
    layout: StepLayout,
}

impl CheckedExecutor {
    /// Wraps an executor without buffers, because the mirror only sees writes that pass through
    /// here.
    pub fn new(gpu: VulkanExecutor) -> Self {
        let fault = testing::fault(testing::WRONG_RESULT).and_then(|v| {
            let n: Vec<usize> = v.split(',').filter_map(|n| n.parse().ok()).collect();
            (n.len() == 4).then(|| InjectedFault {
                dispatch: n[0],
                output: n[1],
                word: n[2],
                mask: n[3] as u32,
            })
        });
        CheckedExecutor {
            gpu,
            mirror: Buffers::default(),
            labels: HashMap::new(),
            count: 0,
            stale: HashSet::new(),
            canonical: Vec::new(),
            plans: Vec::new(),
            calls: 0,
            fault,
        }
    }

    /// Returns the number of kernel calls of the last run. For tests of fused calls.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Corrupts one result in every later run. For tests.
    pub fn inject_fault(&mut self, fault: InjectedFault) {
        self.fault = Some(fault);
    }

    /// Returns the checked executor. For faults in tests.
    pub fn device(&mut self) -> &mut VulkanExecutor {
        &mut self.gpu
    }

    fn device_bytes(&mut self, id: BufferId) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.mirror.len(id)];
        self.gpu.read(id, 0, &mut bytes)?;
        Ok(bytes)
    }

    fn mirror_bytes(&self, id: BufferId) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.mirror.len(id)];
        self.mirror.read(id, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Runs the dispatches `range`, which share `calls`, on both sides, and compares their outputs.
    fn run_group(
        &mut self,
        recorded: &CheckedPlan,
        range: Range<usize>,
        calls: &[Call],
        step: &StepView<'_>,
    ) -> Result<()> {
        let dispatches = &recorded.dispatches[range.clone()];
        self.refuse_stale(dispatches, range.start)?;
        let mut all: Vec<(usize, CheckedOutput)> = Vec::new();
        for i in range.clone() {
            let list = outputs(
                &recorded.dispatches[i].op,
                &self.canonical,
                recorded.layout.max_rows,
                i > range.start,
            );
            // An output that a later dispatch of the group overwrites cannot be compared.
            all.retain(|(_, before)| list.iter().all(|output| output.id != before.id));
            all.extend(list.into_iter().map(|output| (i, output)));
        }
        // Without calls nothing is written, so the twins must not write either.
        let is_written = |id| calls.is_empty() || calls.iter().any(|call| call.writes(id));
        let (written, left): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|(_, output)| is_written(output.id));
        let before = left
            .iter()
            .map(|(_, o)| Ok((o.id, self.mirror_bytes(o.id)?)))
            .collect::<Result<Vec<_>>>()?;
        let sizes = self.sizes_of_products(dispatches, step);
        let mut computed = poison::computed(dispatches);
        computed.retain(|own| written.iter().any(|(_, output)| output.id == own.id));
        let held = self.poison_mirror(&computed)?;
        for dispatch in dispatches {
            reference::run(&dispatch.op, &self.mirror, &self.canonical, recorded.layout, step);
        }
        self.poison_device(&computed, held)?;
        if !calls.is_empty() {
            self.gpu.poison_own(calls)?;
            self.gpu.run_calls(calls)?;
        }
        self.apply_fault(&written)?;
        let mut device = HashMap::new();
        for (_, output) in &written {
            device.insert(output.id, self.device_bytes(output.id)?);
        }
        for (i, output) in &written {
            let sizes = sizes.get(&output.id).map_or(&[][..], |sizes| sizes);
            if let Some(difference) = self.compare(output, &device, sizes)? {
                let Dispatch { label, layer, .. } = &recorded.dispatches[*i];
                let layer = layer.map_or(String::new(), |l| format!(" of layer {l}"));
                bail!(
                    "dispatch {i}, `{label}`{layer}, differs from its twin in {}: {difference}",
                    output.name
                );
            }
        }
        for (id, bytes) in device {
            self.mirror.write(id, 0, &bytes)?;
            self.stale.remove(&id);
        }
        for (id, bytes) in before {
            self.mirror.write(id, 0, &bytes)?;
            self.stale.insert(id);
        }
        Ok(())
    }

    /// Poisons buffers of the mirror. Returns their previous content.
    fn poison_mirror(&mut self, computed: &[Computed]) -> Result<Vec<Vec<u8>>> {
        let mut held = Vec::new();
        for Computed { id, .. } in computed {
            let bytes = self.mirror_bytes(*id)?;
            let mut poisoned = bytes.clone();
            poison::fill(&mut poisoned);
            self.mirror.write(*id, 0, &poisoned)?;
            held.push(bytes);
        }
        Ok(held)
    }

    /// Poisons those elements of the device's buffers that the twins wrote. Restores the mirror's
    /// other elements from `held`.
    fn poison_device(&mut self, computed: &[Computed], held: Vec<Vec<u8>>) -> Result<()> {
        for (Computed { id, unit }, mut bytes) in computed.iter().zip(held) {
            let mut twin = self.mirror_bytes(*id)?;
            let written = poison::trace(&mut bytes, &mut twin, *unit);
            self.mirror.write(*id, 0, &twin)?;
            if !written.is_empty() {
                self.gpu.write(*id, written.start, &bytes[written])?;
            }
        }
        Ok(())
    }

    /// Returns, per row, the size of the terms of products with terms that cancel each other.
    fn sizes_of_products(
        &self,
        dispatches: &[Dispatch],
        step: &StepView<'_>,
    ) -> HashMap<BufferId, Vec<f32>> {
        let mut sizes = HashMap::new();
        for dispatch in dispatches {
            if let Op::Experts(op) = &dispatch.op
                && !op.is_gated()
            {
                sizes.insert(op.out, self.sizes_of_experts(op, step));
            }
            let Op::Linear(Linear { jobs, rows }) = &dispatch.op else { continue };
            for job in jobs {
                let (matrix, live) = (&self.canonical[job.weight.0 as usize], step.live(*rows));
                if matrix.format.code.spec().side.has_min() {
                    // SAFETY: no kernel is in flight, and no other code writes to the mirror.
                    let act = unsafe { reference::act_view(&self.mirror, &job.act, live.clone()) };
                    let mut rows = vec![0.0; live.start];
                    rows.extend(reference::linear::sizes(matrix, &act));
                    sizes.insert(job.out, rows);
                }
            }
        }
        sizes
    }

    /// Returns, per row, the largest size of the terms of its slots.
    fn sizes_of_experts(&self, op: &Experts, step: &StepView<'_>) -> Vec<f32> {
        let matrix = &self.canonical[op.first().0 as usize];
        let mut sizes = vec![0f32; step.rows];
        if !matrix.format.code.spec().side.has_min() {
            return Vec::new();
        }
        let n = matrix.rows / op.experts;
        for slot in step.live(RowSet::Slots(op.used)) {
            // SAFETY: no kernel is in flight, and no other code writes to the mirror.
            let (act, expert) = unsafe {
                (
                    reference::act_view(&self.mirror, &op.act, slot..slot + 1),
                    self.mirror.slice::<u32>(op.chosen, slot, 1)[0] as usize,
                )
            };
            let own = reference::linear::sizes(&matrix.part(expert * n..(expert + 1) * n), &act);
            let size = &mut sizes[slot / op.used];
            *size = size.max(own[0]);
        }
        sizes
    }

    /// Fails if a dispatch reads a skipped output. The comparison cannot detect that, because
    /// device and twin read the same bytes.
    fn refuse_stale(&self, dispatches: &[Dispatch], first: usize) -> Result<()> {
        let mut made = HashSet::new();
        for (i, dispatch) in dispatches.iter().enumerate() {
            if let Some(id) = dispatch
                .op
                .inputs()
                .into_iter()
                .find(|id| self.stale.contains(id) && !made.contains(id))
            {
                let i = first + i;
                bail!(
                    "dispatch {i}, `{}`, reads the buffer `{}`, which was left out",
                    dispatch.label,
                    self.labels[&id]
                );
            }
            made.extend(dispatch.op.outputs());
        }
        Ok(())
    }

    /// Applies the injected fault of a test.
    fn apply_fault(&mut self, written: &[(usize, CheckedOutput)]) -> Result<()> {
        let Some(fault) = self.fault else { return Ok(()) };
        let Some((_, output)) =
            written.iter().filter(|(i, _)| *i == fault.dispatch).nth(fault.output)
        else {
            return Ok(());
        };
        let mut word = [0; 4];
        self.gpu.read(output.id, 4 * fault.word, &mut word)?;
        let word = u32::from_le_bytes(word) ^ fault.mask;
        self.gpu.write(output.id, 4 * fault.word, &word.to_le_bytes())
    }

    /// Returns the first difference that exceeds the tolerance of an output. `sizes` has the sizes
    /// of its rows' terms, if they cannot be derived from the numbers.
    fn compare(
        &self,
        output: &CheckedOutput,
        device: &HashMap<BufferId, Vec<u8>>,
        sizes: &[f32],
    ) -> Result<Option<Difference>> {
        let (bytes, twin) = (&device[&output.id], self.mirror_bytes(output.id)?);
        Ok(match output.content {
            Content::F32(grid, rule) => first_difference::<f32>(bytes, &twin, grid, rule, sizes),
            Content::F16(grid, rule) => {
                first_difference::<half::f16>(bytes, &twin, grid, rule, &[])
            }
            Content::Codes { input, act, near } => {
                let (codes, wanted): (Vec<i8>, Vec<i8>) = (typed(bytes), typed(&twin));
                let input: Vec<f32> = typed(&self.mirror_bytes(input)?);
                let (scales, n): (Vec<f32>, _) =
                    (typed(&device[&act.scales]), act.format.groups(act.cols));
                first_wrong_code(&codes, &wanted, act.cols, |row| {
                    let input = &input[row * act.cols..][..act.cols];
                    let codes = &codes[row * act.cols..][..act.cols];
                    unrounded(input, &act, near, (&scales[row * n..][..n], codes))
                })
            }
            Content::Scales { input, act, near } if act.format.tried() > 1 => {
                let (scales, mut wanted): (Vec<f32>, Vec<f32>) = (typed(bytes), typed(&twin));
                let input: Vec<f32> = typed(&self.mirror_bytes(input)?);
                let n = act.format.groups(act.cols);
                let codes: Vec<i8> = typed(&device[&act.values]);
                let device = scales.chunks_exact(n).zip(codes.chunks_exact(act.cols));
                let rows = wanted.chunks_exact_mut(n).zip(device);
                for ((twin, device), input) in rows.zip(input.chunks_exact(act.cols)) {
                    if twin != device.0 {
                        let right = right_scales(input, &act, near, device, twin);
                        twin.copy_from_slice(&right);
                    }
                }
                let (twin, rule) = (bytemuck::cast_slice(&wanted), Rule::Near(near));
                first_difference::<f32>(bytes, twin, OutputLayout::rows(n), rule, &[])
            }
            Content::Scales { act, near, .. } => {
                let grid = OutputLayout::rows(act.format.groups(act.cols));
                first_difference::<f32>(bytes, &twin, grid, Rule::Near(near), &[])
            }
            // Codes may differ from the twin's, so the expected sums are those of the device's
            // codes.
            Content::Sums { codes, cols, groups } => {
                let codes: Vec<i8> = typed(&device[&codes]);
                let sums = codes
                    .chunks_exact(cols / groups)
                    .map(|group| group.iter().map(|c| *c as i32).sum::<i32>());
                let (mut wanted, sums): (Vec<i32>, Vec<i32>) = (typed(bytes), sums.collect());
                let n = wanted.len().min(sums.len());
                wanted[..n].copy_from_slice(&sums[..n]);
                first_difference::<i32>(
                    bytes,
                    bytemuck::cast_slice(&wanted),
                    OutputLayout::rows(groups),
                    Rule::Same,
                    &[],
                )
            }
            Content::Q8 { grid, codes, exact } => {
                first_q8_difference(bytes, &twin, grid, codes, exact)
            }
            Content::Lists => {
                let (lists, wanted): (Vec<u32>, Vec<u32>) = (typed(bytes), typed(&twin));
                let pairs = lists.chunks_exact(best::WORDS).zip(wanted.chunks_exact(best::WORDS));
                let differ = |(a, b): (&[u32], &[u32])| a != b && best::parse(a) != best::parse(b);
                let row = pairs.map(differ).position(|d| d);
                row.map(|row| Difference {
                    row,
                    column: 0,
                    words: "a list of other tokens or logits".into(),
                })
            }
        })
    }

    /// Fails if a kernel has changed bytes outside its outputs. Call after the outputs were
    /// compared.
    fn refuse_strays(&mut self) -> Result<()> {
        let mut ids: Vec<BufferId> = self.labels.keys().copied().collect();
        ids.sort_unstable_by_key(|id| id.0);
        for id in ids {
            let (device, mirror) = (self.device_bytes(id)?, self.mirror_bytes(id)?);
            if let Some(at) = device.iter().zip(&mirror).position(|(a, b)| a != b) {
                bail!(
                    "a kernel changed byte {at} of the buffer `{}`, which it should not have",
                    self.labels[&id]
                );
            }
        }
        Ok(())
    }
}

impl Executor for CheckedExecutor {
    fn caps(&self) -> Caps {
        self.gpu.caps()
    }

    fn key_block(&self, part: Part) -> fn(KvFormat) -> usize {
        self.gpu.key_block(part)
    }

    fn alloc(&mut self, label: &str, bytes: usize) -> Result<BufferId> {
        let id = self.gpu.alloc(label, bytes)?;
        while self.count < id.0 {
            self.mirror.alloc("the device's own", 0)?;
            self.count += 1;
        }
        self.count += 1;
        self.labels.insert(id, label.to_owned());
        let mirrored = self.mirror.alloc(label, bytes)?;
        assert_eq!(id, mirrored);
        Ok(id)
    }

    fn load(&mut self, jobs: Vec<LoadJob<'_>>) -> Result<Vec<WeightId>> {
        for job in &jobs {
            self.canonical.push(job.matrix.read(0..job.matrix.rows)?);
        }
        self.gpu.load(jobs)
    }

    fn write(&mut self, buffer: BufferId, offset: usize, bytes: &[u8]) -> Result<()> {
        self.mirror.write(buffer, offset, bytes)?;
        self.stale.remove(&buffer);
        self.gpu.write(buffer, offset, bytes)
    }

    fn read(&mut self, buffer: BufferId, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.gpu.read(buffer, offset, bytes)
    }

    fn record(&mut self, plan: Plan, step: BufferId, layout: StepLayout) -> Result<PlanId> {
        self.plans.push(CheckedPlan { dispatches: plan.dispatches.clone(), step, layout });
        let id = self.gpu.record(plan, step, layout)?;
        assert_eq!(id.0 as usize, self.plans.len() - 1);
        Ok(id)
    }

    /// Returns after all dispatches have run and been compared.
    fn start(&mut self, plan: PlanId, _: Option<(BufferId, usize)>) -> Result<bool> {
        let recorded = self.plans[plan.0 as usize].clone();
        let mut words = vec![0u32; recorded.layout.words()];
        self.mirror.read(recorded.step, 0, bytemuck::cast_slice_mut(&mut words))?;
        let step = recorded.layout.view(&words);
        let calls = self.gpu.calls_of(plan, Bucket::of_step(&step))?;
        self.calls = calls.len();
        let mut groups = calls.chunk_by(|a, b| a.dispatches == b.dispatches).peekable();
        let mut i = 0;
        while i < recorded.dispatches.len() {
            // A dispatch without calls is only correct if its twin changes nothing.
            let (dispatches, group) = match groups.next_if(|calls| calls[0].dispatches.start == i) {
                Some(calls) => (calls[0].dispatches.clone(), calls),
                None => (i..i + 1, &[][..]),
            };
            i = dispatches.end;
            self.run_group(&recorded, dispatches, group, &step)?;
        }
        ensure!(groups.next().is_none(), "calls of a plan must have the order of its dispatches");
        self.refuse_strays()?;
        Ok(false)
    }

    fn is_busy(&self) -> bool {
        false
    }

    fn finish(&mut self, result: Option<(BufferId, &mut [u8])>) -> Result<()> {
        result.map_or(Ok(()), |(buffer, bytes)| self.read(buffer, 0, bytes))
    }

    fn lend(&self, _: BufferId, _: usize) -> Option<&[u8]> {
        None
    }
}

impl Reports for CheckedExecutor {
    fn report(&self) -> Report {
        let report = self.gpu.report();
        Report { device: format!("{}, every result checked", report.device), ..report }
    }

    fn start_profile(&mut self) {
        self.gpu.start_profile();
    }

    fn read_bandwidth(&mut self) -> Option<f64> {
        self.gpu.read_bandwidth()
    }

    fn upload_bandwidth(&mut self) -> Option<f64> {
        self.gpu.upload_bandwidth()
    }

    /// Does nothing: every call is poisoned anyway.
    fn set_poison(&mut self, _: bool) {}
}
