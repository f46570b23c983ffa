//! Values of `--npu`.

/// Values of `--npu`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Npu {
    /// Uses an NPU if it is predicted to save time.
    #[default]
    Auto,
    Off,
    /// Uses an NPU regardless of the prediction.
    Force,
    /// Uses the model of an NPU on the host.
    Model,
}

impl std::str::FromStr for Npu {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(Npu::Auto),
            "off" => Ok(Npu::Off),
            "force" => Ok(Npu::Force),
            "model" => Ok(Npu::Model),
            _ => Err("expected auto, off, force or model".into()),
        }
    }
}

impl Npu {
    /// Returns whether an NPU is used regardless of the prediction. A plan then includes its
    /// memory.
    pub fn is_asked(&self) -> bool {
        matches!(self, Npu::Force | Npu::Model)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_named_exactly() {
        assert_eq!(
            ["auto", "off", "force", "model"].map(|s| s.parse()),
            [Npu::Auto, Npu::Off, Npu::Force, Npu::Model].map(Ok)
        );
        assert!(["", "on", "model:x", "force:1"].iter().all(|s| s.parse::<Npu>().is_err()));
    }
}
