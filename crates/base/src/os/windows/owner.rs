//! Owners of files and directories.

use super::{checked, wide};
use std::io;
use std::os::windows::io::{AsRawHandle, FromRawHandle, OwnedHandle};
use std::path::Path;
use std::ptr::null_mut;
use windows_sys::Win32::Foundation::LocalFree;
use windows_sys::Win32::Security::Authorization::{GetNamedSecurityInfoW, SE_FILE_OBJECT};
use windows_sys::Win32::Security::{
    EqualSid, GetTokenInformation, OWNER_SECURITY_INFORMATION, PSID, TOKEN_QUERY, TokenOwner,
    TokenUser,
};
use windows_sys::Win32::System::Threading::{GetCurrentProcess, OpenProcessToken};

/// Returns whether this user owns a file or directory, or the group that owns this process's new
/// files. Files of an administrator belong to all administrators.
pub fn is_own(path: &Path) -> io::Result<bool> {
    let path = wide(path);
    let (mut owner, mut descriptor) = (null_mut(), null_mut());
    // SAFETY: the path ends with a zero. The other pointers point to local variables, or are null
    // to leave a part out.
    let error = unsafe {
        GetNamedSecurityInfoW(
            path.as_ptr(),
            SE_FILE_OBJECT,
            OWNER_SECURITY_INFORMATION,
            &mut owner,
            null_mut(),
            null_mut(),
            null_mut(),
            &mut descriptor,
        )
    };
    if error != 0 {
        return Err(io::Error::from_raw_os_error(error as i32));
    }
    let is_own = is_of_process(owner);
    // SAFETY: the call above allocated the descriptor, and `owner` in it is not used further.
    unsafe { LocalFree(descriptor) };
    is_own
}

/// Returns whether an owner is this process's user or the owner of its new files.
fn is_of_process(owner: PSID) -> io::Result<bool> {
    let mut token = null_mut();
    // SAFETY: the pseudo handle is always valid, and the call writes a handle that is closed once.
    let token = unsafe {
        checked(OpenProcessToken(GetCurrentProcess(), TOKEN_QUERY, &mut token))?;
        OwnedHandle::from_raw_handle(token)
    };
    for class in [TokenUser, TokenOwner] {
        // Both structures begin with a pointer to an identifier, which follows in the buffer and
        // has at most 68 bytes.
        let (mut buffer, mut length) = ([0usize; 32], 0);
        // SAFETY: the call writes at most the buffer, which lives while the pointer in it is used.
        // The owner is valid by the caller.
        unsafe {
            checked(GetTokenInformation(
                token.as_raw_handle(),
                class,
                buffer.as_mut_ptr().cast(),
                size_of_val(&buffer) as u32,
                &mut length,
            ))?;
            if EqualSid(buffer[0] as PSID, owner) != 0 {
                return Ok(true);
            }
        }
    }
    Ok(false)
}
