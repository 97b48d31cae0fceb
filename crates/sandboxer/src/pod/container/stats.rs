//! Converts an agent's statistics for containerd.

use containerd_shim_protos::cgroups_v2::metrics::{CPUStat, MemoryEvents, MemoryStat, Metrics, PidsStat};
use protobuf::{Message, MessageField};
use sandboxer_protocol::agent::StatsResponse;

/// The protobuf type URL of [`encode`]'s result.
pub const TYPE_URL: &str = "io.containerd.cgroups.v2.Metrics";

/// Encodes cgroup v2 metrics as protobuf.
pub fn encode(stats: &StatsResponse) -> Result<Vec<u8>, protobuf::Error> {
    let metrics = Metrics {
        pids: MessageField::some(PidsStat {
            current: stats.pids,
            limit: stats.pids_limit,
            ..Default::default()
        }),
        cpu: MessageField::some(CPUStat {
            usage_usec: stats.cpu_usage_us,
            user_usec: stats.cpu_user_us,
            system_usec: stats.cpu_system_us,
            nr_periods: stats.cpu_periods,
            nr_throttled: stats.cpu_throttled_periods,
            throttled_usec: stats.cpu_throttled_us,
            ..Default::default()
        }),
        memory: MessageField::some(MemoryStat {
            usage: stats.memory_usage,
            usage_limit: stats.memory_limit,
            anon: stats.memory_anon,
            file: stats.memory_file,
            inactive_file: stats.memory_inactive_file,
            pgfault: stats.memory_page_faults,
            pgmajfault: stats.memory_major_page_faults,
            swap_usage: stats.memory_swap,
            ..Default::default()
        }),
        memory_events: MessageField::some(MemoryEvents { oom_kill: stats.oom_kills, ..Default::default() }),
        ..Default::default()
    };
    metrics.write_to_bytes()
}
