//! Kernel interface of the amdxdna driver. The compiler checks that sizes and offsets are those of
//! `include/uapi/drm/amdxdna_accel.h` in Linux.
//!
//! WAIT_CMD is newer than the other calls. On older drivers, [`super::raw`] waits for a timeline.

use bytemuck::{Pod, Zeroable};

/// First ioctl of the driver.
const COMMAND_BASE: u32 = 0x40;

/// Returns the number of an ioctl with an argument that the kernel reads and writes, in Linux's
/// generic encoding.
const fn iowr<T>(number: u32) -> u64 {
    (3 << 30 | (size_of::<T>() as u64) << 16 | (b'd' as u64) << 8) | number as u64
}

/// Returns the number of an ioctl with an argument that the kernel only reads.
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
/// Calls that every DRM driver has.
pub const GEM_CLOSE: u64 = iow::<GemClose>(0x09);
pub const SYNCOBJ_TIMELINE_WAIT: u64 = iowr::<SyncobjTimelineWait>(0xca);

/// Buffer object types.
pub const BO_SHARE: u32 = 1;
pub const BO_DEV_HEAP: u32 = 2;
pub const BO_DEV: u32 = 3;
pub const BO_CMD: u32 = 4;

/// Parameters of `GetInfo`.
pub const QUERY_AIE_METADATA: u32 = 1;
pub const QUERY_FIRMWARE_VERSION: u32 = 8;

pub const CONFIG_CU: u32 = 0;
pub const SYNC_TO_DEVICE: u32 = 0;
pub const SYNC_FROM_DEVICE: u32 = 1;
/// Value for a buffer without a device address. The device then uses the process's address.
pub const INVALID_ADDR: u64 = u64::MAX;

/// Declares structs, and makes the compiler check the size of each and the offset of each field.
macro_rules! abi {
    ($(
        $(#[$doc:meta])*
        $type:ident $size:literal { $($offset:literal $field:ident: $kind:ty,)* }
    )*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
        pub struct $type {
            $(pub $field: $kind,)*
        }

        const _: () = assert!(size_of::<$type>() == $size);
        $(const _: () = assert!(std::mem::offset_of!($type, $field) == $offset);)*
    )*};
}

abi! {
    CreateHwctx 56 {
        0 ext: u64,
        8 ext_flags: u64,
        16 qos_p: u64,
        24 umq_bo: u32,
        28 log_buf_bo: u32,
        32 max_opc: u32,
        36 num_tiles: u32,
        40 mem_size: u32,
        44 umq_doorbell: u32,
        48 handle: u32,
        52 syncobj_handle: u32,
    }
    Qos 24 {
        0 gops: u32,
        4 fps: u32,
        8 dma_bandwidth: u32,
        12 latency: u32,
        16 frame_exec_time: u32,
        20 priority: u32,
    }
    DestroyHwctx 8 {
        0 handle: u32,
        4 pad: u32,
    }
    ConfigHwctx 24 {
        0 handle: u32,
        4 param_type: u32,
        8 param_val: u64,
        16 param_val_size: u32,
        20 pad: u32,
    }
    /// One compute unit, for `ConfigHwctx`.
    ConfigCu 16 {
        0 num_cus: u16,
        2 pad: [u16; 3],
        8 cu_bo: u32,
        12 cu_func: u8,
        13 pad2: [u8; 3],
    }
    CreateBo 32 {
        0 flags: u64,
        8 vaddr: u64,
        16 size: u64,
        24 r#type: u32,
        28 handle: u32,
    }
    GetBoInfo 48 {
        0 ext: u64,
        8 ext_flags: u64,
        16 handle: u32,
        20 pad: u32,
        24 map_offset: u64,
        32 vaddr: u64,
        40 xdna_addr: u64,
    }
    SyncBo 24 {
        0 handle: u32,
        4 direction: u32,
        8 offset: u64,
        16 size: u64,
    }
    ExecCmd 56 {
        0 ext: u64,
        8 ext_flags: u64,
        16 hwctx: u32,
        20 r#type: u32,
        24 cmd_handles: u64,
        32 args: u64,
        40 cmd_count: u32,
        44 arg_count: u32,
        48 seq: u64,
    }
    WaitCmd 16 {
        0 hwctx: u32,
        4 timeout_ms: u32,
        8 seq: u64,
    }
    GetInfo 16 {
        0 param: u32,
        4 buffer_size: u32,
        8 buffer: u64,
    }
    TileMetadata 16 {
        0 row_count: u16,
        2 row_start: u16,
        4 dma_channel_count: u16,
        6 lock_count: u16,
        8 event_reg_count: u16,
        10 pad: [u16; 3],
    }
    AieMetadata 64 {
        0 col_size: u32,
        4 cols: u16,
        6 rows: u16,
        8 version_major: u32,
        12 version_minor: u32,
        16 core: TileMetadata,
        32 mem: TileMetadata,
        48 shim: TileMetadata,
    }
    FirmwareVersion 16 {
        0 major: u32,
        4 minor: u32,
        8 patch: u32,
        12 build: u32,
    }
    GemClose 8 {
        0 handle: u32,
        4 pad: u32,
    }
    /// Arguments of a wait for points on timelines, a call that every DRM driver has.
    SyncobjTimelineWait 48 {
        0 handles: u64,
        8 points: u64,
        16 timeout_nsec: i64,
        24 count_handles: u32,
        28 flags: u32,
        32 first_signaled: u32,
        36 pad: u32,
        40 deadline_nsec: u64,
    }
}

// The numbers were computed by a C compiler.
const _: () = assert!(
    CREATE_HWCTX == 0xc038_6440
        && CREATE_BO == 0xc020_6443
        && EXEC_CMD == 0xc038_6446
        && GEM_CLOSE == 0x4008_6409
);
