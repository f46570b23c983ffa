//! Bytes as hexadecimal text.

/// Two lower-case digits a byte.
pub fn hex(bytes: impl AsRef<[u8]>) -> String {
    bytes.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_has_two_digits() {
        assert_eq!(hex([0, 0x0f, 0xa0, 0xff]), "000fa0ff");
        assert_eq!(hex([]), "");
    }
}
