//! Single values: the announcement port, the next CID.

use super::{Result, Store, StoreError, Tx};

/// Lowest CID given out: 0 to 2 are reserved, and small ones are what people give by hand.
const CID_MIN: i64 = 1024;
/// Highest, exclusive. Far from `VMADDR_CID_ANY`, and positive in every integer type on the way.
const CID_MAX: i64 = 1 << 31;

impl Store {
    pub async fn meta(&self, name: &str) -> Result<Option<String>> {
        Ok(sqlx::query_scalar("SELECT value FROM meta WHERE name = $1")
            .bind(name)
            .fetch_optional(&self.reader)
            .await?)
    }

    pub async fn set_meta(&self, name: &str, value: &str) -> Result<()> {
        sqlx::query(
            "INSERT INTO meta (name, value) VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET value = $2",
        )
        .bind(name)
        .bind(value)
        .execute(&self.writer)
        .await?;
        Ok(())
    }

    /// Where CIDs start, so that two daemons on one host seldom meet. Has no effect once one was given out.
    pub async fn seed_cids(&self, seed: u32) -> Result<()> {
        let first =
            CID_MIN.saturating_add(i64::from(seed).checked_rem(CID_MAX.saturating_sub(CID_MIN)).unwrap_or(0));
        sqlx::query("INSERT INTO meta (name, value) VALUES ('next_cid', $1) ON CONFLICT (name) DO NOTHING")
            .bind(first.to_string())
            .execute(&self.writer)
            .await?;
        Ok(())
    }
}

/// A CID that no sandbox on this host holds. It is not used again soon: numbers go up and wrap around.
pub(super) async fn next_cid(tx: &mut Tx) -> Result<i64> {
    let mut cid: i64 = sqlx::query_scalar::<_, String>("SELECT value FROM meta WHERE name = 'next_cid'")
        .fetch_optional(&mut **tx)
        .await?
        .and_then(|text| text.parse().ok())
        .unwrap_or(CID_MIN);
    let after = |cid: i64| if cid.saturating_add(1) >= CID_MAX { CID_MIN } else { cid.saturating_add(1) };
    while sqlx::query_scalar::<_, i64>("SELECT seq FROM sandboxes WHERE cid = $1")
        .bind(cid)
        .fetch_optional(&mut **tx)
        .await?
        .is_some()
    {
        cid = after(cid);
    }
    sqlx::query(
        "INSERT INTO meta (name, value) VALUES ('next_cid', $1) ON CONFLICT (name) DO UPDATE SET value = $1",
    )
    .bind(after(cid).to_string())
    .execute(&mut **tx)
    .await?;
    Ok(cid)
}

pub(super) fn unknown(what: &str, value: &str) -> StoreError {
    StoreError::Unknown(format!("{what} `{value}`"))
}
