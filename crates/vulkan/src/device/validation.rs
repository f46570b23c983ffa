//! Validation layers for tests. Their messages are printed and counted, and make a test or command
//! fail.

use super::is_set;
use ash::{Entry, Instance, ext, vk};
use std::borrow::Cow;
use std::ffi::{CStr, c_char, c_void};
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Environment variable that enables the validation layers. For tests.
pub const VALIDATE: &str = "GEMMA_VULKAN_VALIDATE";

const LAYER: &CStr = c"VK_LAYER_KHRONOS_validation";

/// Returns whether the layers are installed.
pub fn is_installed() -> bool {
    // SAFETY: the loader is the system's own; loading it only runs its initialisers.
    let Ok(entry) = (unsafe { Entry::load() }) else { return false };
    // SAFETY: the call is passed no pointer.
    let layers = unsafe { entry.enumerate_instance_layer_properties() }.unwrap_or_default();
    layers.iter().any(|l| l.layer_name_as_c_str().is_ok_and(|name| name == LAYER))
}

/// Additions to the arguments of a new instance. Must not be moved while the instance is created.
pub struct Wanted {
    on: bool,
    layers: [*const c_char; 1],
    features: vk::ValidationFeaturesEXT<'static>,
}

/// Also checks the memory accesses of commands.
static SYNCHRONISATION: [vk::ValidationFeatureEnableEXT; 1] =
    [vk::ValidationFeatureEnableEXT::SYNCHRONIZATION_VALIDATION];

impl Wanted {
    pub fn of_environment() -> Wanted {
        let features =
            vk::ValidationFeaturesEXT::default().enabled_validation_features(&SYNCHRONISATION);
        Wanted { on: is_set(VALIDATE), layers: [LAYER.as_ptr()], features }
    }

    /// Returns the extensions that the layers need.
    pub fn extensions(&self) -> Vec<*const c_char> {
        if self.on { vec![ext::debug_utils::NAME.as_ptr()] } else { Vec::new() }
    }

    pub fn add_to<'a>(
        &'a mut self,
        info: vk::InstanceCreateInfo<'a>,
    ) -> vk::InstanceCreateInfo<'a> {
        if !self.on {
            return info;
        }
        info.enabled_layer_names(&self.layers).push_next(&mut self.features)
    }

    /// Subscribes to the layers' messages about an instance.
    pub fn watch(self, entry: &Entry, instance: &Instance) -> Option<Validation> {
        use vk::{DebugUtilsMessageSeverityFlagsEXT as S, DebugUtilsMessageTypeFlagsEXT as T};
        if !self.on {
            return None;
        }
        let info = vk::DebugUtilsMessengerCreateInfoEXT::default()
            .message_severity(S::ERROR | S::WARNING)
            .message_type(T::GENERAL | T::VALIDATION | T::PERFORMANCE)
            .pfn_user_callback(Some(complain))
            .user_data((&raw const COMPLAINTS).cast_mut().cast());
        let functions = ext::debug_utils::Instance::new(entry, instance);
        // SAFETY: the extension is enabled, the messenger lives as long as the instance, and its
        // counter as long as the process.
        unsafe { functions.create_debug_utils_messenger(&info, None) }
            .expect("a messenger for the tests");
        Some(Validation(&COMPLAINTS))
    }
}

static COMPLAINTS: AtomicUsize = AtomicUsize::new(0);

/// Enabled layers, with a counter of their messages.
pub struct Validation(&'static AtomicUsize);

impl Validation {
    /// Panics if there was a message since the last call.
    ///
    /// # Panics
    /// If there was a message and the thread is not already panicking.
    pub fn enforce(&self) {
        let n = self.0.swap(0, Ordering::Relaxed);
        assert!(
            n == 0 || std::thread::panicking(),
            "{n} complaints of the Vulkan validation layers, see above"
        );
    }
}

/// Prints a message and counts it.
unsafe extern "system" fn complain(
    _severity: vk::DebugUtilsMessageSeverityFlagsEXT,
    _kind: vk::DebugUtilsMessageTypeFlagsEXT,
    data: *const vk::DebugUtilsMessengerCallbackDataEXT<'_>,
    complaints: *mut c_void,
) -> vk::Bool32 {
    // SAFETY: the layer's message lives as long as the call.
    let text = unsafe { data.as_ref().and_then(|d| d.message_as_c_str()) }
        .map_or(Cow::from("?"), CStr::to_string_lossy);
    let _ = writeln!(std::io::stderr(), "Vulkan validation: {text}");
    // SAFETY: `watch` registered the counter, which lives as long as the process.
    unsafe { &*complaints.cast::<AtomicUsize>() }.fetch_add(1, Ordering::Relaxed);
    vk::FALSE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_complaint_is_counted_and_fails() {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let data = vk::DebugUtilsMessengerCallbackDataEXT::default().message(c"made up for a test");
        let (severity, kind) = (
            vk::DebugUtilsMessageSeverityFlagsEXT::ERROR,
            vk::DebugUtilsMessageTypeFlagsEXT::VALIDATION,
        );
        let validation = Validation(&COUNT);
        validation.enforce();
        // SAFETY: message and counter outlive the call.
        unsafe { complain(severity, kind, &data, (&raw const COUNT).cast_mut().cast()) };
        assert!(std::panic::catch_unwind(|| validation.enforce()).is_err());
        validation.enforce();
    }
}
