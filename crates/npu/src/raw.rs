//! The driver: /dev/accel/accelN, by ioctl. This code has not run on a device.
//!
//! [`super::uapi`] checks the sizes and offsets of the structures. All code that uses this file
//! also runs on the host model. SYNC_BO makes buffers coherent. A buffer without a device address
//! has the process's address of it (shared virtual memory).

use super::accel::{Accel, Bo, BoKind, Errno, HEAP_BYTES, Info, Outcome, Sync};
use super::uapi::{self, AieMetadata, FirmwareVersion};
use bytemuck::Zeroable;
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Mapping of a buffer in this process.
struct Mapping {
    at: *mut u8,
    bytes: usize,
    /// Address space to unmap; `None` for device buffers, which are inside the heap's mapping.
    reserved: Option<(*mut libc::c_void, usize)>,
}

/// An open amdxdna device.
pub struct RawAccel {
    file: File,
    path: PathBuf,
    maps: HashMap<u32, Mapping>,
    /// Timeline handle of each context.
    timelines: HashMap<u32, u32>,
    /// Whether the driver supports WAIT_CMD.
    can_wait: bool,
}

// SAFETY: the mappings belong to this value alone, and are not tied to a thread.
unsafe impl Send for RawAccel {}

impl RawAccel {
    pub fn open(path: &Path) -> Outcome<RawAccel> {
        let opened = File::options().read(true).write(true).open(path);
        let file = opened
            .map_err(|e| Errno::new(e.raw_os_error().unwrap_or(libc::EIO), "opening the NPU"))?;
        Ok(RawAccel {
            file,
            path: path.to_owned(),
            maps: HashMap::new(),
            timelines: HashMap::new(),
            can_wait: true,
        })
    }

    fn ioctl<T>(&self, request: u64, argument: &mut T, what: &'static str) -> Outcome<()> {
        // Bits 16 to 29 of a request's number are the size of its argument in bytes.
        assert_eq!(request >> 16 & 0x3fff, size_of::<T>() as u64, "{what}: another argument");
        loop {
            // SAFETY: the assertion above ensures that `T` has the size that the kernel accesses,
            // and `abi!` ensures that it has the driver's layout.
            let code =
                unsafe { libc::ioctl(self.file.as_raw_fd(), request as _, argument as *mut T) };
            if code == 0 {
                return Ok(());
            }
            let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
            if errno != libc::EINTR {
                return Err(Errno::new(errno, what));
            }
        }
    }

    fn query<T: bytemuck::Pod>(&self, param: u32, what: &'static str) -> Outcome<T> {
        let mut answer = T::zeroed();
        let buffer = &raw mut answer as u64;
        let mut ask = uapi::GetInfo { param, buffer_size: size_of::<T>() as u32, buffer };
        self.ioctl(uapi::GET_INFO, &mut ask, what)?;
        Ok(answer)
    }

    /// Maps a buffer of the device file at an aligned address.
    fn map(&self, offset: u64, bytes: usize, align: usize) -> Outcome<Mapping> {
        let failed = || {
            Errno::new(
                std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::ENOMEM),
                "mapping a buffer",
            )
        };
        let room = if align > 4096 { bytes + align } else { bytes };
        // SAFETY: reserves new address space, which no other code uses.
        let reserved = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                room,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if reserved == libc::MAP_FAILED {
            return Err(failed());
        }
        let at = (reserved as usize).next_multiple_of(align) as *mut libc::c_void;
        let (access, shared) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        // SAFETY: replaces a part of the address space that was just reserved.
        let mapped = unsafe {
            libc::mmap(at, bytes, access, shared, self.file.as_raw_fd(), offset as libc::off_t)
        };
        if mapped == libc::MAP_FAILED {
            let error = failed();
            // SAFETY: the space was reserved above and was not returned to any caller.
            unsafe { libc::munmap(reserved, room) };
            return Err(error);
        }
        Ok(Mapping { at: mapped.cast(), bytes, reserved: Some((reserved, room)) })
    }

    fn close(&self, handle: u32) {
        // An error is ignored: the system closes the buffer when the file is closed.
        let _ =
            self.ioctl(uapi::GEM_CLOSE, &mut uapi::GemClose { handle, pad: 0 }, "closing a buffer");
    }

    fn wait_on_timeline(&self, context: u32, number: u64, limit: Duration) -> Outcome<()> {
        let what = "waiting for a command";
        let Some(timeline) = self.timelines.get(&context) else {
            return Err(Errno::new(libc::EINVAL, what));
        };
        // SAFETY: all bytes zero are a valid `timespec`.
        let mut now: libc::timespec = unsafe { std::mem::zeroed() };
        // SAFETY: the call writes only to `now`, which is alive.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
        let mut wait = uapi::SyncobjTimelineWait {
            handles: timeline as *const u32 as u64,
            points: &raw const number as u64,
            timeout_nsec: now.tv_sec * 1_000_000_000 + now.tv_nsec + limit.as_nanos() as i64,
            count_handles: 1,
            // DRM_SYNCOBJ_WAIT_FLAGS_WAIT_FOR_SUBMIT: the point may not have been submitted yet.
            flags: 2,
            ..Default::default()
        };
        self.ioctl(uapi::SYNCOBJ_TIMELINE_WAIT, &mut wait, what)
    }
}

impl Accel for RawAccel {
    fn describe(&self) -> String {
        self.path.display().to_string()
    }

    fn is_real_device(&self) -> bool {
        true
    }

    fn info(&mut self) -> Outcome<Info> {
        let metadata: AieMetadata = self.query(uapi::QUERY_AIE_METADATA, "asking for the array")?;
        let firmware: FirmwareVersion =
            self.query(uapi::QUERY_FIRMWARE_VERSION, "asking for the firmware")?;
        Ok(Info { metadata, firmware })
    }

    fn create_bo(&mut self, kind: BoKind, bytes: usize) -> Outcome<Bo> {
        let r#type = match kind {
            BoKind::Heap => uapi::BO_DEV_HEAP,
            BoKind::Device => uapi::BO_DEV,
            BoKind::Share => uapi::BO_SHARE,
            BoKind::Command => uapi::BO_CMD,
        };
        let size = bytes.next_multiple_of(4096);
        let mut create = uapi::CreateBo { size: size as u64, r#type, ..Default::default() };
        self.ioctl(uapi::CREATE_BO, &mut create, "creating a buffer")?;
        let handle = create.handle;
        let mut info = uapi::GetBoInfo { handle, ..Default::default() };
        let mapping = self.ioctl(uapi::GET_BO_INFO, &mut info, "asking for a buffer").and_then(
            |()| match info.vaddr {
                0 => self.map(
                    info.map_offset,
                    size,
                    if kind == BoKind::Heap { HEAP_BYTES } else { 4096 },
                ),
                at => Ok(Mapping { at: at as *mut u8, bytes: size, reserved: None }),
            },
        );
        let mapping = match mapping {
            Ok(mapping) => mapping,
            Err(e) => {
                self.close(handle);
                return Err(e);
            }
        };
        let address =
            if info.xdna_addr == uapi::INVALID_ADDR { mapping.at as u64 } else { info.xdna_addr };
        self.maps.insert(handle, mapping);
        Ok(Bo { handle, kind, bytes, address })
    }

    fn close_bo(&mut self, bo: Bo) {
        if let Some(mapping) = self.maps.remove(&bo.handle) {
            if let Some((at, bytes)) = mapping.reserved {
                // Device buffers are inside the heap's mapping and are unmapped with it.
                let gone = at as usize..at as usize + bytes;
                self.maps.retain(|_, m| m.reserved.is_some() || !gone.contains(&(m.at as usize)));
                // SAFETY: `map` has mapped it, and no slice of it is alive, because slices borrow
                // `self`.
                unsafe { libc::munmap(at, bytes) };
            }
            self.close(bo.handle);
        }
    }

    fn bytes(&mut self, bo: &Bo) -> &mut [u8] {
        match self.maps.get(&bo.handle) {
            // SAFETY: the memory is mapped while the entry exists. The borrow of `self` keeps the
            // entry and excludes other slices.
            Some(m) => unsafe { std::slice::from_raw_parts_mut(m.at, bo.bytes.min(m.bytes)) },
            None => &mut [],
        }
    }

    fn sync(&mut self, bo: &Bo, direction: Sync, offset: usize, bytes: usize) -> Outcome<()> {
        let direction =
            if direction == Sync::ToDevice { uapi::SYNC_TO_DEVICE } else { uapi::SYNC_FROM_DEVICE };
        let mut sync = uapi::SyncBo {
            handle: bo.handle,
            direction,
            offset: offset as u64,
            size: bytes as u64,
        };
        self.ioctl(uapi::SYNC_BO, &mut sync, "syncing a buffer")
    }

    fn create_context(&mut self, tiles: u32) -> Outcome<u32> {
        let qos = uapi::Qos::zeroed();
        let mut create = uapi::CreateHwctx {
            qos_p: &raw const qos as u64,
            max_opc: 0x800,
            num_tiles: tiles,
            ..Default::default()
        };
        self.ioctl(uapi::CREATE_HWCTX, &mut create, "creating a context")?;
        self.timelines.insert(create.handle, create.syncobj_handle);
        Ok(create.handle)
    }

    fn configure(&mut self, context: u32, image: &Bo, function: u8) -> Outcome<()> {
        let units = uapi::ConfigCu {
            num_cus: 1,
            cu_bo: image.handle,
            cu_func: function,
            ..Default::default()
        };
        let mut config = uapi::ConfigHwctx {
            handle: context,
            param_type: uapi::CONFIG_CU,
            param_val: &raw const units as u64,
            param_val_size: size_of_val(&units) as u32,
            pad: 0,
        };
        self.ioctl(uapi::CONFIG_HWCTX, &mut config, "loading the image")
    }

    fn destroy_context(&mut self, context: u32) {
        if self.timelines.remove(&context).is_some() {
            // An error is ignored: the system destroys the context when the file is closed.
            let mut destroy = uapi::DestroyHwctx { handle: context, pad: 0 };
            let _ = self.ioctl(uapi::DESTROY_HWCTX, &mut destroy, "destroying a context");
        }
    }

    fn execute(&mut self, context: u32, command: &Bo, buffers: &[u32]) -> Outcome<u64> {
        let mut exec = uapi::ExecCmd {
            hwctx: context,
            // With only one command, the field has its handle instead of a pointer.
            cmd_handles: command.handle as u64,
            cmd_count: 1,
            args: buffers.as_ptr() as u64,
            arg_count: buffers.len() as u32,
            ..Default::default()
        };
        self.ioctl(uapi::EXEC_CMD, &mut exec, "submitting a command")?;
        Ok(exec.seq)
    }

    fn wait(&mut self, context: u32, number: u64, limit: Duration) -> Outcome<()> {
        let end = Instant::now() + limit;
        if self.can_wait {
            let timeout_ms = limit.as_millis() as u32;
            let mut wait = uapi::WaitCmd { hwctx: context, timeout_ms, seq: number };
            match self.ioctl(uapi::WAIT_CMD, &mut wait, "waiting for a command") {
                Err(e)
                    if matches!(
                        e.code,
                        libc::ENOTTY | libc::EINVAL | libc::EOPNOTSUPP | libc::EACCES
                    ) =>
                {
                    self.can_wait = false
                }
                done => return done,
            }
        }
        self.wait_on_timeline(context, number, end.saturating_duration_since(Instant::now()))
    }
}

impl Drop for RawAccel {
    fn drop(&mut self) {
        for (at, bytes) in self.maps.values().filter_map(|m| m.reserved) {
            // SAFETY: `map` has mapped it, and no slice outlives `self`.
            unsafe { libc::munmap(at, bytes) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every call on a file that is not an NPU returns the system's error and leaves nothing open.
    #[test]
    fn what_is_no_npu_says_so() {
        assert_eq!(
            RawAccel::open(Path::new("/nonexistent/accel0")).err().unwrap().code,
            libc::ENOENT
        );
        let mut accel = RawAccel::open(Path::new("/dev/null")).unwrap();
        for code in [
            accel.info().unwrap_err().code,
            accel.create_bo(BoKind::Share, 4096).unwrap_err().code,
            accel.create_context(16).unwrap_err().code,
        ] {
            assert_eq!(code, libc::ENOTTY);
        }
        let bo = Bo { handle: 1, kind: BoKind::Share, bytes: 16, address: 0 };
        assert!(
            accel.sync(&bo, Sync::ToDevice, 0, 16).is_err() && accel.execute(1, &bo, &[1]).is_err()
        );
        assert!(accel.wait(1, 1, Duration::from_millis(1)).is_err());
        assert!(accel.bytes(&bo).is_empty());
        accel.close_bo(bo);
        accel.destroy_context(1);
        assert!(accel.maps.is_empty() && accel.timelines.is_empty());
    }
}
