//! Crashes that no code returns from: a mapped file that cannot be read, and memory that the system
//! refuses. [`watch`] installs handlers that print a message and end with an exit code.

use super::{process, terminal};
pub use crate::os::allocator::Allocator;
use crate::os::exit::{self, REPORT};
pub use crate::os::exit::{Crash, CrashReport};
use std::ffi::c_void;
use windows_sys::Win32::Foundation::EXCEPTION_IN_PAGE_ERROR;
use windows_sys::Win32::Storage::FileSystem::WriteFile;
use windows_sys::Win32::System::Console::{GetStdHandle, STD_ERROR_HANDLE};
use windows_sys::Win32::System::Diagnostics::Debug::{
    AddVectoredExceptionHandler, EXCEPTION_CONTINUE_SEARCH, EXCEPTION_POINTERS,
};
use windows_sys::Win32::System::ProcessStatus::K32GetMappedFileNameW;
use windows_sys::Win32::System::Threading::GetCurrentProcess;

/// Ends the process after a refused allocation, since no handler runs at the abort that would
/// follow. Without a crash report, the process aborts.
pub fn note_refusal() {
    if REPORT.get().is_some() {
        end(&Crash::OutOfMemory);
    }
}

/// Installs the handlers.
pub fn watch(report: CrashReport) {
    let _ = REPORT.set(report);
    // SAFETY: the function has the signature of a handler and lives as long as the program.
    unsafe { AddVectoredExceptionHandler(1, Some(on_exception)) };
}

/// Writes parts of a message to standard error, without allocating or locking.
pub fn say(parts: &[&str]) {
    for part in parts {
        let (mut written, none) = (0, std::ptr::null_mut());
        // SAFETY: the bytes are alive. A failed write cannot be reported.
        unsafe {
            let file = GetStdHandle(STD_ERROR_HANDLE);
            WriteFile(file, part.as_ptr(), part.len() as u32, &mut written, none);
        }
    }
}

/// Handles an exception: a page of a mapping could not be read.
///
/// The reading instruction raised the exception, so the thread was not inside an allocation or a
/// lock of the library. The handler may therefore allocate.
unsafe extern "system" fn on_exception(info: *mut EXCEPTION_POINTERS) -> i32 {
    // SAFETY: the system passes valid structures. The second word of this exception is the address.
    let (code, address) = unsafe {
        let record = &*(*info).ExceptionRecord;
        (record.ExceptionCode, record.ExceptionInformation[1])
    };
    if code == EXCEPTION_IN_PAGE_ERROR {
        end(&Crash::Unreadable(mapped_file(address as *const c_void)));
    }
    EXCEPTION_CONTINUE_SEARCH
}

/// Returns the name of the file that is mapped at this address.
fn mapped_file(address: *const c_void) -> Option<String> {
    let mut name = [0u16; 1024];
    // SAFETY: the address is only looked up, and the call writes at most the buffer.
    let length = unsafe {
        K32GetMappedFileNameW(GetCurrentProcess(), address, name.as_mut_ptr(), name.len() as u32)
    };
    (length > 0).then(|| String::from_utf16_lossy(&name[..length as usize]))
}

/// Ends the process without destructors and exit handlers, because other threads still run.
fn end(crash: &Crash) -> ! {
    let code = exit::report(crash);
    terminal::restore();
    process::end(code.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::allocator;
    use crate::os::exit::Exit;
    use std::alloc::{GlobalAlloc, Layout};
    use std::process::Command;
    use windows_sys::Win32::System::Diagnostics::Debug::RaiseException;

    /// Variable that tells this program, started as its own child, how to end.
    const CRASH: &str = "GEMMA_TEST_CRASH";

    fn told(crash: &Crash) -> u8 {
        say(&["told: ", if matches!(crash, Crash::OutOfMemory) { "memory" } else { "page" }]);
        5
    }

    #[test]
    fn crashes_end_with_a_message_and_a_code() {
        let layout = Layout::new::<[u8; 1 << 20]>();
        match std::env::var(CRASH).as_deref() {
            Ok("page") => {
                watch(told);
                // SAFETY: the handler ends the process before this returns.
                unsafe { RaiseException(EXCEPTION_IN_PAGE_ERROR as u32, 0, 3, [0, 1, 0].as_ptr()) };
                unreachable!();
            }
            Ok(how) => {
                if how == "memory" {
                    watch(told);
                }
                allocator::limit(1 << 10);
                // SAFETY: the layout is not empty; the memory is not used.
                assert!(unsafe { Allocator.alloc(layout) }.is_null());
                std::alloc::handle_alloc_error(layout);
            }
            Err(_) => {}
        }
        let test = std::thread::current().name().unwrap().to_owned();
        let end = |how: &str| {
            let mut child = Command::new(std::env::current_exe().unwrap());
            let child = child.args(["--exact", &test, "--nocapture"]).env(CRASH, how);
            let output = child.output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            (Exit::of_status(output.status), said.contains(&format!("told: {how}")))
        };
        assert_eq!(end("page"), (Exit::Code(5), true));
        assert_eq!(end("memory"), (Exit::Code(5), true));
        // A child without a crash report aborts.
        assert_eq!(end("abort"), (Exit::Memory, false));
    }

    #[test]
    fn a_mapped_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a file");
        std::fs::write(&path, [7; 100]).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        // SAFETY: no other code accesses the file.
        let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
        let named = mapped_file(map[50..].as_ptr().cast()).unwrap();
        assert!(named.ends_with(r"\a file"), "{named}");
        assert_eq!(mapped_file(std::ptr::without_provenance(1)), None);
    }
}
