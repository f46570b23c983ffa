//! Scalar twins of the kernels, written for reading.

pub mod linear;
