//! Texts and commands of remedies, per system. Commands are for a shell on Unix and for PowerShell
//! on Windows.

/// Texts and commands of one system.
#[derive(Clone, Copy)]
pub struct Remedies {
    /// Directory below `/` with one node per GPU with a kernel driver, if the system has such
    /// nodes.
    pub gpu_nodes: Option<&'static str>,
    /// How to install a Vulkan driver, as one phrase.
    pub vulkan_driver: &'static str,
    pub install_vulkan: &'static str,
    pub install_vulkan_commands: &'static [&'static str],
    /// How to list the processes that hold GPU memory, as text or as commands.
    pub gpu_users: &'static str,
    pub gpu_users_commands: &'static [&'static str],
    /// Whether the kernel limits a GPU's share of main memory and the limit can be raised.
    pub has_gpu_limit: bool,
    pub largest_processes: &'static str,
    pub unknown_memory: &'static str,
    /// Environment variable that locates the user's directories.
    pub home: &'static str,
    pub set_home: &'static str,
    /// Command that creates a directory owned by the user; the quoted path follows.
    pub own_directory: &'static str,
    /// Command that shows driver messages.
    pub system_log: &'static str,
    /// How to make a driver wait longer for the end of a submission.
    pub longer_passes: &'static str,
}

/// Linux and the other Unix systems.
pub const UNIX: Remedies = Remedies {
    gpu_nodes: Some("dev/dri"),
    vulkan_driver: "install a Vulkan driver (Debian: mesa-vulkan-drivers and libvulkan1)",
    install_vulkan: "install the Vulkan loader and the driver of your GPU:",
    install_vulkan_commands: &[
        "sudo apt install libvulkan1 mesa-vulkan-drivers  # Debian, Ubuntu",
        "sudo dnf install vulkan-loader mesa-vulkan-drivers  # Fedora",
        "sudo apt install nvidia-driver  # NVIDIA",
    ],
    gpu_users: "close the programs that hold the rest:",
    gpu_users_commands: &["sudo fuser -v /dev/dri/renderD*"],
    has_gpu_limit: true,
    largest_processes: "ps -eo rss,comm --sort=-rss | head",
    unknown_memory: "mount /proc (containers: --security-opt systempaths=unconfined)",
    home: "HOME",
    set_home: "export HOME=DIRECTORY",
    own_directory: "sudo install -d -o \"$USER\"",
    system_log: "sudo dmesg",
    longer_passes: "amdgpu.lockup_timeout=10000 on Linux's command line",
};

/// Windows.
pub const WINDOWS: Remedies = Remedies {
    gpu_nodes: None,
    vulkan_driver: "install the driver of your GPU",
    install_vulkan: "install the driver of your GPU from AMD, Intel or NVIDIA, \
        which brings Vulkan; that of Windows Update may lack it",
    install_vulkan_commands: &[],
    gpu_users: "close the programs that hold the rest (Task Manager, Details, \
        column Dedicated GPU memory)",
    gpu_users_commands: &[],
    has_gpu_limit: false,
    largest_processes: "Get-Process | Sort-Object WorkingSet64 | Select-Object -Last 10",
    unknown_memory: "restart Windows",
    home: "LOCALAPPDATA",
    set_home: "$env:LOCALAPPDATA = 'DIRECTORY'",
    own_directory: "New-Item -ItemType Directory",
    system_log: "Event Viewer, Windows Logs, System",
    longer_passes: "TdrDelay=10 below HKLM\\SYSTEM\\CurrentControlSet\\Control\\GraphicsDrivers",
};

/// The system that this program is compiled for.
pub const HERE: Remedies = if cfg!(windows) { WINDOWS } else { UNIX };
