//! Loads the kernel's C++ source as a shared library for this processor. A core of the array calls
//! the same functions.

use anyhow::{Context, Result, ensure};
use gemma::npu::host::Core;
use gemma::npu::layout::{KernelShape, OBJECT};
use std::ffi::{CString, c_char, c_void};
use std::path::Path;
use std::sync::Arc;

type Begin = unsafe extern "C" fn(*const u8, *mut u8, *mut i32);
type Take = unsafe extern "C" fn(*const u8, *mut u8, *mut u8);
type End = unsafe extern "C" fn(*mut u8, *mut u8);

/// Alignment of a core's state.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u8; 64]);

/// An open library. Dropping it closes the library.
struct Handle(*mut c_void);

/// A loaded library.
pub struct Library {
    _handle: Handle,
    begin: Begin,
    query: Take,
    tile: Take,
    end: End,
    /// Size of a core's state in bytes. `design.py` allocates as many.
    pub state_bytes: usize,
    pub shape: KernelShape,
}

// SAFETY: the functions have no state; each core has its own.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Loads a library made from `npu-kernels/flash_partial.cc`.
    pub fn open(path: &Path) -> Result<Arc<Library>> {
        let name =
            CString::new(path.as_os_str().as_encoded_bytes()).context("a path with a zero byte")?;
        // SAFETY: the path ends in zero, and the test built the library from our own source.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        ensure!(!handle.is_null(), "cannot load {}: {}", path.display(), last_error());
        // Closes the library if a symbol is missing.
        let handle = Handle(handle);
        let symbol = |name: &std::ffi::CStr| -> Result<*mut c_void> {
            // SAFETY: the handle is open, the name ends in zero.
            let at = unsafe { libc::dlsym(handle.0, name.as_ptr()) };
            ensure!(!at.is_null(), "{} has no function {}", path.display(), name.to_string_lossy());
            Ok(at)
        };
        // SAFETY: the library was made from this project's source, which declares these functions
        // and constants with these types.
        unsafe {
            let word = |name| symbol(name).map(|at| at.cast::<u32>().read() as usize);
            let head_dim = word(c"flash_head_dim")?;
            Ok(Arc::new(Library {
                begin: std::mem::transmute::<*mut c_void, Begin>(symbol(c"flash_begin")?),
                query: std::mem::transmute::<*mut c_void, Take>(symbol(c"flash_query")?),
                tile: std::mem::transmute::<*mut c_void, Take>(symbol(c"flash_tile")?),
                end: std::mem::transmute::<*mut c_void, End>(symbol(c"flash_end")?),
                state_bytes: word(c"flash_state_bytes")?,
                shape: KernelShape::new(head_dim)
                    .with_context(|| format!("a kernel for heads of {head_dim} channels"))?,
                _handle: handle,
            }))
        }
    }

    /// Returns a core that runs the library's functions.
    pub fn core(self: &Arc<Library>) -> Box<dyn Core> {
        let lines = |bytes: usize| vec![Line([0; 64]); bytes.div_ceil(64)];
        let (state, out) = (lines(self.state_bytes), lines(self.shape.out_bytes()));
        Box::new(LibraryCore { code: self.clone(), state, object: lines(OBJECT), out })
    }
}

fn last_error() -> String {
    // SAFETY: dlerror returns null or a string that ends in zero.
    unsafe {
        let text: *mut c_char = libc::dlerror();
        if text.is_null() {
            "unknown".into()
        } else {
            std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: opened in `open`; no core outlives the library.
        unsafe { libc::dlclose(self.0) };
    }
}

struct LibraryCore {
    code: Arc<Library>,
    state: Vec<Line>,
    object: Vec<Line>,
    out: Vec<Line>,
}

impl LibraryCore {
    /// Copies the object to an aligned address, as on a core.
    fn take(&mut self, object: &[u8]) -> *const u8 {
        for (line, part) in self.object.iter_mut().zip(object.chunks_exact(64)) {
            line.0.copy_from_slice(part);
        }
        self.object.as_ptr().cast()
    }
}

impl Core for LibraryCore {
    fn begin(&mut self, header: &[u8]) -> usize {
        let (object, mut tiles) = (self.take(header), 0);
        // SAFETY: an object, the state and a word, each of the size that the function expects.
        unsafe { (self.code.begin)(object, self.state.as_mut_ptr().cast(), &mut tiles) };
        tiles as u32 as usize
    }

    fn query(&mut self, object: &[u8]) {
        let object = self.take(object);
        // SAFETY: an object, the state and a result, each of the size that the function expects.
        unsafe {
            (self.code.query)(object, self.state.as_mut_ptr().cast(), self.out.as_mut_ptr().cast())
        };
    }

    fn tile(&mut self, object: &[u8]) {
        let object = self.take(object);
        // SAFETY: as above.
        unsafe {
            (self.code.tile)(object, self.state.as_mut_ptr().cast(), self.out.as_mut_ptr().cast())
        };
    }

    fn end(&mut self, out: &mut [u8]) {
        // SAFETY: the state and a result.
        unsafe { (self.code.end)(self.state.as_mut_ptr().cast(), self.out.as_mut_ptr().cast()) };
        for (line, part) in self.out.iter().zip(out.chunks_mut(64)) {
            part.copy_from_slice(&line.0[..part.len()]);
        }
    }
}
