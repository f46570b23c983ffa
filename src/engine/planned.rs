//! The engine that runs plans.
pub struct PlannedEngine;
