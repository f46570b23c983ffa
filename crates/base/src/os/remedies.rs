//! Words and commands of remedies, by system. Commands are for a shell on Unix and for PowerShell
//! on Windows.

/// Words and commands of a system.
#[derive(Clone, Copy)]
pub struct Remedies {
    /// Directory below `/` with a node of each GPU that has a kernel driver, where the system has
    /// such nodes.
    pub gpu_nodes: Option<&'static str>,
    /// Brings a Vulkan driver, in one phrase.
    pub vulkan_driver: &'static str,
    pub install_vulkan: &'static str,
    pub install_vulkan_commands: &'static [&'static str],
    /// Shows the processes that hold memory of a GPU, by words or by a command.
    pub gpu_users: &'static str,
    pub gpu_users_commands: &'static [&'static str],
    /// Whether the kernel has a limit on a GPU's part of the main memory that can be raised.
    pub has_gpu_limit: bool,
    pub largest_processes: &'static str,
    pub unknown_memory: &'static str,
    /// Variable that the directories of the user are found by.
    pub home: &'static str,
    pub set_home: &'static str,
    /// Makes a directory of the user; the path in quotes follows.
    pub own_directory: &'static str,
    /// Shows the messages of drivers.
    pub system_log: &'static str,
    /// Lets a driver wait longer for the end of a submission.
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
