//! Wall-clock time, and its text.

use crate::lifecycle::UnixMs;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use time::OffsetDateTime;

/// Where the daemon gets the time from. Tests move it forward without waiting.
#[derive(Debug, Default)]
pub struct Clock {
    ahead_ms: AtomicI64,
}

impl Clock {
    pub fn now(&self) -> UnixMs {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = i64::try_from(since.as_millis()).unwrap_or(i64::MAX);
        now.saturating_add(self.ahead_ms.load(Ordering::Relaxed))
    }

    #[cfg(test)]
    pub fn advance(&self, ms: i64) {
        self.ahead_ms.fetch_add(ms, Ordering::Relaxed);
    }
}

/// RFC 3339 in UTC with milliseconds.
pub fn rfc3339(at: UnixMs) -> String {
    let time = OffsetDateTime::from_unix_timestamp_nanos(i128::from(at).saturating_mul(1_000_000))
        .unwrap_or(OffsetDateTime::UNIX_EPOCH);
    format!(
        "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z",
        time.year(),
        u8::from(time.month()),
        time.day(),
        time.hour(),
        time.minute(),
        time.second(),
        time.millisecond()
    )
}

#[cfg(test)]
mod tests {
    #[test]
    fn times_are_rfc_3339_in_utc() {
        assert_eq!(super::rfc3339(1_700_000_000_042), "2023-11-14T22:13:20.042Z");
    }
}
