//! C library calls that tests make fail.
//!
//! In a build with the feature `testing`, each function here replaces the C library's function of
//! the same name, for this program and its libraries. It asks [`testing::fails`] before it makes
//! the system call.

use crate::testing::{self, PAGE, Point};
use libc::{c_char, c_int, c_long, c_uint, c_void, mode_t, off64_t, size_t, ssize_t};

/// Sets the error of the C library and returns -1, or kills the process.
fn refuse(error: c_int) -> c_long {
    if testing::is_deadly() {
        // SAFETY: sends a signal to this process.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    }
    // SAFETY: the address is that of this thread's own errno.
    unsafe { *libc::__errno_location() = error };
    -1
}

/// Defines a function that fails on request and otherwise makes the system call.
macro_rules! calls {
    ($($name:ident($($arg:ident: $kind:ty),*) -> $result:ty,
        $point:expr, $error:ident, $number:ident($($passed:expr),*);)*) => {$(
        /// # Safety
        /// As for the C library's function of the same name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $kind),*) -> $result {
            let point: Option<Point> = $point;
            let result = if point.is_some_and(testing::fails) {
                refuse(libc::$error)
            } else {
                // SAFETY: the caller upholds this function's contract.
                unsafe { libc::syscall(libc::$number, $($passed),*) }
            };
            result as $result
        }
    )*};
}

calls! {
    open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int,
        Some(Point::Open), EMFILE, SYS_openat(libc::AT_FDCWD, path, flags, mode);
    open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int,
        Some(Point::Open), EMFILE, SYS_openat(libc::AT_FDCWD, path, flags, mode);
    read(file: c_int, to: *mut c_void, len: size_t) -> ssize_t,
        holds_data(file).then_some(Point::Read), EIO, SYS_read(file, to, len);
    pread64(file: c_int, to: *mut c_void, len: size_t, at: off64_t) -> ssize_t,
        Some(Point::Read), EIO, SYS_pread64(file, to, len, at);
    write(file: c_int, from: *const c_void, len: size_t) -> ssize_t,
        written(file), ENOSPC, SYS_write(file, from, len);
    pwrite64(file: c_int, from: *const c_void, len: size_t, at: off64_t) -> ssize_t,
        Some(Point::Write), ENOSPC, SYS_pwrite64(file, from, len, at);
    fsync(file: c_int) -> c_int, Some(Point::Sync), EIO, SYS_fsync(file);
    fdatasync(file: c_int) -> c_int, Some(Point::Sync), EIO, SYS_fdatasync(file);
    rename(from: *const c_char, to: *const c_char) -> c_int,
        Some(Point::Rename), EIO, SYS_renameat2(libc::AT_FDCWD, from, libc::AT_FDCWD, to, 0);
    renameat(from_dir: c_int, from: *const c_char, to_dir: c_int, to: *const c_char) -> c_int,
        Some(Point::Rename), EIO, SYS_renameat2(from_dir, from, to_dir, to, 0);
    renameat2(
        from_dir: c_int, from: *const c_char, to_dir: c_int, to: *const c_char, flags: c_uint
    ) -> c_int,
        Some(Point::Rename), EIO, SYS_renameat2(from_dir, from, to_dir, to, flags);
}

/// Returns whether the descriptor is a file or a pipe, as opposed to a terminal, a socket, or a
/// counter that wakes threads.
fn holds_data(file: c_int) -> bool {
    // SAFETY: the structure is plain numbers, written by the call and read only if it succeeded.
    let mode = unsafe {
        let mut stat: libc::stat64 = std::mem::zeroed();
        if libc::fstat64(file, &mut stat) == 0 { stat.st_mode } else { 0 }
    };
    [libc::S_IFREG, libc::S_IFIFO].contains(&(mode & libc::S_IFMT))
}

fn written(file: c_int) -> Option<Point> {
    match file {
        libc::STDERR_FILENO => Some(Point::Message),
        _ => holds_data(file).then_some(Point::Write),
    }
}

/// # Safety
/// As for the C library's function of the same name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    start: *mut c_void,
    len: size_t,
    protection: c_int,
    flags: c_int,
    file: c_int,
    at: off64_t,
) -> *mut c_void {
    let is_file = file >= 0 && flags & libc::MAP_ANONYMOUS == 0;
    if is_file && testing::fails(Point::Map) {
        return refuse(libc::ENOMEM) as *mut c_void;
    }
    let map = |start: *mut c_void, len: size_t, flags: c_int, at: off64_t| {
        // SAFETY: the caller upholds this function's contract for the whole range and for each
        // page.
        unsafe { libc::syscall(libc::SYS_mmap, start, len, protection, flags, file, at) }
    };
    let mapped = map(start, len, flags, at);
    if mapped == -1 || !is_file || protection & libc::PROT_WRITE != 0 {
        return mapped as *mut c_void;
    }
    if let Some(page) = testing::first_failure(Point::Page, len.div_ceil(PAGE) as u64) {
        // This page maps a part of the file far past its end.
        let page = (mapped as usize + page as usize * PAGE) as *mut c_void;
        map(page, PAGE, flags | libc::MAP_FIXED, 1 << 50);
    }
    mapped as *mut c_void
}

/// # Safety
/// As for the C library's function of the same name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    start: *mut c_void,
    len: size_t,
    protection: c_int,
    flags: c_int,
    file: c_int,
    at: off64_t,
) -> *mut c_void {
    // SAFETY: the caller upholds this function's contract.
    unsafe { mmap64(start, len, protection, flags, file, at) }
}
