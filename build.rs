//! Passes the commit and the target of the build to `gemma --version`, and to the tests whether
//! there is a Vulkan driver.
//!
//! The build time is not passed, so that two builds of one commit are equal. A source archive
//! without `.git` names no commit; a package made by cargo has the commit in a file.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(vulkan_driver)");
    let driver = find_vulkan_driver();
    if driver == VulkanDriver::Counts {
        println!("cargo::rustc-cfg=vulkan_driver");
    }
    // Only builds of tests have the feature.
    if std::env::var_os("CARGO_FEATURE_TESTING").is_some() && driver == VulkanDriver::OnProcessor {
        println!(
            "cargo::warning=tests of the GPU are left out, because the only Vulkan driver computes \
            on the processor: GEMMA_REQUIRE_GPU=1 runs them, for half an hour on two cores"
        );
    }
    let variable = |name: &str| std::env::var(name).ok();
    // See `crates/base/src/os/windows/fmaf.rs`.
    let target = ["OS", "ENV"].map(|part| variable(&format!("CARGO_CFG_TARGET_{part}")));
    if target == ["windows", "gnu"].map(|part| Some(part.to_owned())) {
        println!("cargo::rustc-link-arg=-Wl,--wrap=fmaf");
        // The main thread gets a stack of 8 MiB, as on Linux.
        println!("cargo::rustc-link-arg=-Wl,--stack,8388608");
    }
    // The commit would rebuild the crate after each commit, so development builds do not name it.
    let commit = match variable("PROFILE").as_deref() {
        Some("release") => packaged().or_else(checked_out),
        _ => Some("development build".into()),
    };
    let features = match variable("CARGO_FEATURE_BUNDLED") {
        Some(_) => "with bundled models",
        None => "without bundled models",
    };
    let target = variable("TARGET").unwrap_or_default();
    let about: Vec<String> = commit.into_iter().chain([target, features.to_owned()]).collect();
    println!(
        "cargo::rustc-env=DESCRIPTION_OF_BUILD={} ({})",
        variable("CARGO_PKG_VERSION").unwrap_or_default(),
        about.join(", ")
    );
}

/// The Vulkan driver that tests may use.
#[derive(PartialEq)]
enum VulkanDriver {
    Missing,
    /// Mesa's software driver. It is slow, and no variable asks for it.
    OnProcessor,
    Counts,
}

/// Looks for an installed Vulkan driver. GPU tests are ignored unless it returns `Counts`.
fn find_vulkan_driver() -> VulkanDriver {
    let asked = |name: &str| {
        println!("cargo::rerun-if-env-changed={name}");
        std::env::var_os(name)
    };
    let named = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"].map(asked);
    let wanted = ["GEMMA_REQUIRE_GPU", "GEMMA_VULKAN_CPU"].map(asked);
    let is_wanted = wanted.iter().flatten().any(|value| value == "1");
    let manifests = |folder: &str| {
        let folder = Path::new(folder);
        // The creation of a folder changes its parent.
        let watched = folder.ancestors().find(|folder| folder.exists()).unwrap_or(folder);
        println!("cargo::rerun-if-changed={}", watched.display());
        std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some())
    };
    let folders = ["/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d"];
    // Packages install drivers of all GPUs, so the device files show which driver has a GPU.
    let devices = ["/dev/dri/renderD128", "/dev/nvidiactl", "/dev/dxg"];
    let has_gpu = devices.iter().any(|device| Path::new(device).exists());
    match named.iter().any(Option::is_some) || folders.map(manifests).contains(&true) {
        false => VulkanDriver::Missing,
        true if has_gpu || is_wanted => VulkanDriver::Counts,
        true => VulkanDriver::OnProcessor,
    }
}

/// Returns the commit that `cargo package` has recorded.
fn packaged() -> Option<String> {
    let text = std::fs::read_to_string(".cargo_vcs_info.json").ok()?;
    let (_, rest) = text.split_once("\"sha1\"")?;
    short(rest.split('"').nth(1)?).map(|commit| format!("commit {commit}"))
}

/// Returns the checked-out commit, if this directory is the top of a working tree.
fn checked_out() -> Option<String> {
    if !Path::new(".git").exists() {
        return None;
    }
    // The log changes with every commit and checkout.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"])?;
    if Path::new(&log).exists() {
        println!("cargo::rerun-if-changed={log}");
    }
    short(&git(&["rev-parse", "HEAD"])?).map(|commit| format!("commit {commit}"))
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git")
        .args(arguments)
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

/// Returns the first twelve digits of a hash.
fn short(hash: &str) -> Option<String> {
    hash.get(..12).filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit())).map(str::to_owned)
}
