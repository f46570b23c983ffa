//! The kernel interface of the amdxdna driver: facts of its ABI, declared anew. Sizes and offsets
//! are those of `include/uapi/drm/amdxdna_accel.h` in Linux, held by the compiler below.
//!
//! WAIT_CMD and GET_ARRAY came later than the rest; only WAIT_CMD is used, and there is another way
//! to wait where it is missing.

#![allow(missing_docs)]

use bytemuck::{Pod, Zeroable};

/// Driver ioctls begin here.
const COMMAND_BASE: u32 = 0x40;

/// An ioctl that is read and written, as the generic Linux encoding numbers it.
const fn iowr<T>(number: u32) -> u64 {
    (3 << 30 | (size_of::<T>() as u64) << 16 | (b'd' as u64) << 8) | number as u64
}

/// An ioctl that is only written.
const fn iow<T>(number: u32) -> u64 {
    (1 << 30 | (size_of::<T>() as u64) << 16 | (b'd' as u64) << 8) | number as u64
}

pub const CREATE_HWCTX: u64 = iowr::<CreateHwctx>(COMMAND_BASE);
pub const DESTROY_HWCTX: u64 = iowr::<DestroyHwctx>(COMMAND_BASE + 1);
pub const CONFIG_HWCTX: u64 = iowr::<ConfigHwctx>(COMMAND_BASE + 2);
pub const CREATE_BO: u64 = iowr::<CreateBo>(COMMAND_BASE + 3);
pub const GET_BO_INFO: u64 = iowr::<GetBoInfo>(COMMAND_BASE + 4);
pub const SYNC_BO: u64 = iowr::<SyncBo>(COMMAND_BASE + 5);
pub const EXEC_CMD: u64 = iowr::<ExecCmd>(COMMAND_BASE + 6);
pub const GET_INFO: u64 = iowr::<GetInfo>(COMMAND_BASE + 7);
pub const WAIT_CMD: u64 = iowr::<WaitCmd>(COMMAND_BASE + 9);
/// Of every DRM driver.
pub const GEM_CLOSE: u64 = iow::<GemClose>(0x09);
pub const SYNCOBJ_TIMELINE_WAIT: u64 = iowr::<SyncobjTimelineWait>(0xca);

/// Buffer object types.
pub const BO_SHARE: u32 = 1;
pub const BO_DEV_HEAP: u32 = 2;
pub const BO_DEV: u32 = 3;
pub const BO_CMD: u32 = 4;

/// What `GetInfo` asks for.
pub const QUERY_AIE_METADATA: u32 = 1;
pub const QUERY_FIRMWARE_VERSION: u32 = 8;

pub const CONFIG_CU: u32 = 0;
pub const SYNC_TO_DEVICE: u32 = 0;
pub const SYNC_FROM_DEVICE: u32 = 1;
/// No address: the process's own is the device's.
pub const INVALID_ADDR: u64 = u64::MAX;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct CreateHwctx {
    pub ext: u64,
    pub ext_flags: u64,
    pub qos_p: u64,
    pub umq_bo: u32,
    pub log_buf_bo: u32,
    pub max_opc: u32,
    pub num_tiles: u32,
    pub mem_size: u32,
    pub umq_doorbell: u32,
    pub handle: u32,
    pub syncobj_handle: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Qos {
    pub gops: u32,
    pub fps: u32,
    pub dma_bandwidth: u32,
    pub latency: u32,
    pub frame_exec_time: u32,
    pub priority: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct DestroyHwctx {
    pub handle: u32,
    pub pad: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct ConfigHwctx {
    pub handle: u32,
    pub param_type: u32,
    pub param_val: u64,
    pub param_val_size: u32,
    pub pad: u32,
}

/// One compute unit, as `ConfigHwctx` takes it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct ConfigCu {
    pub num_cus: u16,
    pub pad: [u16; 3],
    pub cu_bo: u32,
    pub cu_func: u8,
    pub pad2: [u8; 3],
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct CreateBo {
    pub flags: u64,
    pub vaddr: u64,
    pub size: u64,
    pub r#type: u32,
    pub handle: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct GetBoInfo {
    pub ext: u64,
    pub ext_flags: u64,
    pub handle: u32,
    pub pad: u32,
    pub map_offset: u64,
    pub vaddr: u64,
    pub xdna_addr: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct SyncBo {
    pub handle: u32,
    pub direction: u32,
    pub offset: u64,
    pub size: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct ExecCmd {
    pub ext: u64,
    pub ext_flags: u64,
    pub hwctx: u32,
    pub r#type: u32,
    pub cmd_handles: u64,
    pub args: u64,
    pub cmd_count: u32,
    pub arg_count: u32,
    pub seq: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct WaitCmd {
    pub hwctx: u32,
    pub timeout_ms: u32,
    pub seq: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct GetInfo {
    pub param: u32,
    pub buffer_size: u32,
    pub buffer: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct TileMetadata {
    pub row_count: u16,
    pub row_start: u16,
    pub dma_channel_count: u16,
    pub lock_count: u16,
    pub event_reg_count: u16,
    pub pad: [u16; 3],
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct AieMetadata {
    pub col_size: u32,
    pub cols: u16,
    pub rows: u16,
    pub version_major: u32,
    pub version_minor: u32,
    pub core: TileMetadata,
    pub mem: TileMetadata,
    pub shim: TileMetadata,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct FirmwareVersion {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
    pub build: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct GemClose {
    pub handle: u32,
    pub pad: u32,
}

/// Of every DRM driver: waits for points on timelines.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct SyncobjTimelineWait {
    pub handles: u64,
    pub points: u64,
    pub timeout_nsec: i64,
    pub count_handles: u32,
    pub flags: u32,
    pub first_signaled: u32,
    pub pad: u32,
    pub deadline_nsec: u64,
}

/// Holds a struct to its size and the offsets of the fields named.
macro_rules! abi {
    ($($type:ident $size:literal { $($field:ident $offset:literal),* })*) => {$(
        const _: () = assert!(size_of::<$type>() == $size);
        $(const _: () = assert!(std::mem::offset_of!($type, $field) == $offset);)*
    )*};
}

abi! {
    CreateHwctx 56 { qos_p 16, umq_bo 24, log_buf_bo 28, max_opc 32, num_tiles 36, mem_size 40, umq_doorbell 44, handle 48, syncobj_handle 52 }
    Qos 24 { priority 20 }
    DestroyHwctx 8 { handle 0 }
    ConfigHwctx 24 { param_type 4, param_val 8, param_val_size 16 }
    ConfigCu 16 { num_cus 0, cu_bo 8, cu_func 12 }
    CreateBo 32 { vaddr 8, size 16, r#type 24, handle 28 }
    GetBoInfo 48 { handle 16, map_offset 24, vaddr 32, xdna_addr 40 }
    SyncBo 24 { direction 4, offset 8, size 16 }
    ExecCmd 56 { hwctx 16, r#type 20, cmd_handles 24, args 32, cmd_count 40, arg_count 44, seq 48 }
    WaitCmd 16 { timeout_ms 4, seq 8 }
    GetInfo 16 { buffer_size 4, buffer 8 }
    TileMetadata 16 { event_reg_count 8 }
    AieMetadata 64 { cols 4, rows 6, version_major 8, core 16, mem 32, shim 48 }
    FirmwareVersion 16 { build 12 }
    GemClose 8 { handle 0 }
    SyncobjTimelineWait 48 { points 8, timeout_nsec 16, count_handles 24, flags 28, first_signaled 32, deadline_nsec 40 }
}

// The numbers as a C compiler gives them.
const _: () = assert!(
    CREATE_HWCTX == 0xc038_6440
        && CREATE_BO == 0xc020_6443
        && EXEC_CMD == 0xc038_6446
        && GEM_CLOSE == 0x4008_6409
);
