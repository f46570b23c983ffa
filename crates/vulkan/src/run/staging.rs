//! Writes to the device before a pass or a readback.

use super::*;
use gemma_base::compute::poison;

impl VulkanExecutor {
    /// Stages the pending writes, followed by `then`, for the next submission.
    ///
    /// The bytes of a write are in the command buffer, and a barrier orders it after earlier
    /// submissions. The writes for one pass can therefore be prepared while the pass before it
    /// still runs.
    pub(super) fn stage(&mut self, then: Option<vk::CommandBuffer>) -> Result<()> {
        let pending = std::mem::take(&mut self.pending);
        if pending.is_empty() && then.is_none() {
            return Ok(());
        }
        let targets: Vec<(vk::Buffer, u64, &[u8])> = pending
            .iter()
            .map(|(id, offset, bytes)| {
                let span = &self.spans[id.0 as usize];
                (self.block(span).buffer, span.offset + *offset as u64, &bytes[..])
            })
            .collect();
        self.queue.stage(
            |device, commands| {
                barrier(device, commands);
                let mut written: Vec<(vk::Buffer, u64, u64)> = Vec::new();
                for (buffer, offset, bytes) in targets {
                    let end = offset + bytes.len() as u64;
                    // The later of two writes to the same range must win.
                    if written
                        .iter()
                        .any(|(other, from, to)| *other == buffer && *from < end && offset < *to)
                    {
                        barrier(device, commands);
                        written.clear();
                    }
                    written.push((buffer, offset, end));
                    for (i, part) in bytes.chunks(UPDATE).enumerate() {
                        // SAFETY: `write` checked the bounds, and that sizes are multiples of 4.
                        unsafe {
                            device.cmd_update_buffer(
                                commands,
                                buffer,
                                offset + (i * UPDATE) as u64,
                                part,
                            )
                        };
                    }
                }
                barrier(device, commands);
            },
            then,
        )
    }

    /// Fills new memory with zeros.
    pub(super) fn clear(&mut self, span: Span) -> Result<()> {
        // A model has hundreds of buffers, so this is deferred to the next submission.
        self.fill(&[span], 0)
    }

    /// Poisons everything that a pass computes.
    pub(super) fn poison_pass(&mut self, plan: PlanId) -> Result<()> {
        let recorded = &self.plans[plan.0 as usize];
        let step = recorded.layout.view(bytemuck::cast_slice(&self.steps[&recorded.step]));
        let computed = poison::before_pass(&recorded.dispatches, &step);
        let spans: Vec<Span> = computed
            .into_iter()
            .map(|own| own.id)
            .chain(self.own.iter().flat_map(Own::scratch))
            .map(|id| self.spans[id.0 as usize])
            .collect();
        self.fill(&spans, poison::WORD)
    }

    /// Poisons the executor's buffers that these calls compute.
    pub(crate) fn poison_own(&mut self, calls: &[Call]) -> Result<()> {
        let is_written = |id: &BufferId| calls.iter().any(|call| call.writes(*id));
        let scratch = self.own.iter().flat_map(Own::scratch).filter(is_written);
        let spans: Vec<Span> = scratch.map(|id| self.spans[id.0 as usize]).collect();
        self.fill(&spans, poison::WORD)
    }

    /// Fills buffers with a word, before the next submission.
    fn fill(&mut self, spans: &[Span], word: u32) -> Result<()> {
        let buffers: Vec<vk::Buffer> = spans.iter().map(|span| self.block(span).buffer).collect();
        // SAFETY: the spans are inside their blocks, and have whole words.
        let filled = |device: &ash::Device, commands| unsafe {
            for (span, buffer) in spans.iter().zip(buffers) {
                device.cmd_fill_buffer(commands, buffer, span.offset, span.bytes, word);
            }
            barrier(device, commands);
        };
        self.queue.stage(filled, None)
    }
}
