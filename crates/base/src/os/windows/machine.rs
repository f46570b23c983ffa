//! Facts about the machine.

use super::{checked, wide};
use windows_sys::Win32::Foundation::ERROR_SUCCESS;
use windows_sys::Win32::System::Registry::{HKEY_LOCAL_MACHINE, RRF_RT_REG_SZ, RegGetValueW};
use windows_sys::Win32::System::SystemInformation::{GlobalMemoryStatusEx, MEMORYSTATUSEX};

/// Returns the name of the processor.
pub fn processor_name() -> Option<String> {
    let key = wide(r"HARDWARE\DESCRIPTION\System\CentralProcessor\0");
    let (value, mut name) = (wide("ProcessorNameString"), [0u16; 256]);
    let mut bytes = size_of_val(&name) as u32;
    // SAFETY: the names end with a zero, and the call writes at most `bytes` to `name`.
    let error = unsafe {
        RegGetValueW(
            HKEY_LOCAL_MACHINE,
            key.as_ptr(),
            value.as_ptr(),
            RRF_RT_REG_SZ,
            std::ptr::null_mut(),
            name.as_mut_ptr().cast(),
            &mut bytes,
        )
    };
    let text = name.split(|unit| *unit == 0).next().unwrap_or_default();
    (error == ERROR_SUCCESS).then(|| String::from_utf16_lossy(text).trim().to_owned())
}

fn status() -> Option<MEMORYSTATUSEX> {
    let mut status = MEMORYSTATUSEX {
        dwLength: size_of::<MEMORYSTATUSEX>() as u32,
        ..MEMORYSTATUSEX::default()
    };
    // SAFETY: the call fills the structure, which has its size.
    checked(unsafe { GlobalMemoryStatusEx(&mut status) }).ok()?;
    Some(status)
}

/// Returns `None`: the cache size is not queried.
pub fn last_level_cache() -> Option<u64> {
    None
}

/// Returns the bytes of main memory.
pub fn memory() -> Option<u64> {
    status().map(|status| status.ullTotalPhys)
}

/// Returns the bytes of main memory that programs can allocate without swapping.
///
/// The system refuses allocations beyond its page files and memory.
pub fn available_memory() -> Option<u64> {
    status().map(|status| status.ullAvailPhys.min(status.ullAvailPageFile))
}

/// Returns `None`: the system keeps no load average.
pub fn load_average() -> Option<f64> {
    None
}
