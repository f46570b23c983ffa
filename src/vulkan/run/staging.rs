//! Writes to the device before a pass or a readback.

use super::*;

impl VulkanExecutor {
    /// Stages the pending writes, and `then` after them, for the next submission.
    ///
    /// The bytes of a write lie in the command buffer, and a barrier orders it after earlier
    /// submissions. So the writes for one pass are prepared while the pass before it still runs.
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
                    // The later of two writes to one place must win.
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

    /// Fills fresh memory with zeros.
    pub(super) fn clear(&mut self, span: Span) -> Result<()> {
        let buffer = self.block(&span).buffer;
        // SAFETY: the span lies inside its block.
        let cleared = |device: &ash::Device, commands| unsafe {
            device.cmd_fill_buffer(commands, buffer, span.offset, span.bytes, 0);
            barrier(device, commands);
        };
        // A model has hundreds of buffers, so this waits for the next submission.
        self.queue.stage(cleared, None)
    }
}
