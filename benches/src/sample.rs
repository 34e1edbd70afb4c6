//! One machine's figures. What was not measured is none.

/// Times in milliseconds, memory in KiB.
#[derive(Debug, Default, Clone)]
pub struct Sample {
    /// Spawn of the monitor to the agent's first word.
    pub cold_hello_ms: Option<f64>,
    /// Spawn of the monitor to the first command's exit code.
    pub cold_exec_ms: Option<f64>,
    /// Request to take a saved machine up, to the first command's exit code.
    pub restore_exec_ms: Option<f64>,
    /// A command on a running machine: request to exit code.
    pub exec_ms: Vec<f64>,
    /// Private memory of the monitor's process, guest memory aside.
    pub overhead_kib: Option<f64>,
    /// All its resident memory, guest pages included.
    pub resident_kib: Option<f64>,
    pub counts: Vec<(&'static str, f64)>,
    /// Phases of a start, in milliseconds.
    pub phases: Vec<(&'static str, f64)>,
}
