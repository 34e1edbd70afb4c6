-- Times are milliseconds since 1970-01-01 UTC, sizes carry their unit in the name, JSON is text.
-- Nothing here is SQLite's alone but AUTOINCREMENT: PostgreSQL comes next behind the same trait.

CREATE TABLE meta (
    name  TEXT PRIMARY KEY NOT NULL,
    value TEXT NOT NULL
);

CREATE TABLE keys (
    id          TEXT PRIMARY KEY NOT NULL,
    org         TEXT NOT NULL,
    name        TEXT NOT NULL,
    secret_hash BLOB NOT NULL,
    scopes      TEXT NOT NULL,
    created_at  BIGINT NOT NULL,
    expires_at  BIGINT,
    revoked_at  BIGINT
);

CREATE TABLE sandboxes (
    seq                INTEGER PRIMARY KEY AUTOINCREMENT,
    id                 TEXT NOT NULL UNIQUE,
    org                TEXT NOT NULL,
    actor              TEXT NOT NULL,
    request_id         TEXT,
    fingerprint        TEXT NOT NULL,
    name               TEXT,
    metadata           TEXT NOT NULL,
    env                TEXT NOT NULL,
    template           TEXT NOT NULL,
    template_version   TEXT NOT NULL,
    vcpus              BIGINT NOT NULL,
    memory_mib         BIGINT NOT NULL,
    disk_mib           BIGINT NOT NULL,
    ttl_ms             BIGINT,
    expires_at         BIGINT,
    -- The guest's address on AF_VSOCK, for as long as the host may hold a machine for this sandbox.
    cid                BIGINT,
    boot_id            TEXT,
    state              TEXT NOT NULL,
    holds              TEXT NOT NULL,
    created_at         BIGINT NOT NULL,
    running_at         BIGINT,
    metered_since      BIGINT,
    metered_ms         BIGINT NOT NULL,
    failed_at          BIGINT,
    failure_code       TEXT,
    failure_detail     TEXT,
    delete_accepted_at BIGINT,
    delete_reason      TEXT,
    released_at        BIGINT,
    phases             TEXT NOT NULL
);

-- A caller's key makes at most one sandbox.
CREATE UNIQUE INDEX sandboxes_by_request ON sandboxes (org, request_id) WHERE request_id IS NOT NULL;
-- No two machines on this host share an address.
CREATE UNIQUE INDEX sandboxes_by_cid ON sandboxes (cid) WHERE cid IS NOT NULL;
CREATE INDEX sandboxes_by_org ON sandboxes (org, seq);
CREATE INDEX sandboxes_unreleased ON sandboxes (seq) WHERE released_at IS NULL;
CREATE INDEX sandboxes_by_expiry ON sandboxes (expires_at) WHERE expires_at IS NOT NULL AND delete_accepted_at IS NULL;

CREATE TABLE commands (
    seq                INTEGER PRIMARY KEY AUTOINCREMENT,
    id                 TEXT NOT NULL UNIQUE,
    sandbox_id         TEXT NOT NULL REFERENCES sandboxes (id),
    org                TEXT NOT NULL,
    actor              TEXT NOT NULL,
    request_id         TEXT NOT NULL,
    fingerprint        TEXT NOT NULL,
    argv               TEXT NOT NULL,
    cwd                TEXT,
    -- Environment and standard input are forgotten once the command has ended.
    env                TEXT,
    user_name          TEXT,
    stdin              BLOB,
    timeout_ms         BIGINT,
    output_limit_bytes BIGINT NOT NULL,
    background         BIGINT NOT NULL,
    status             TEXT NOT NULL,
    accepted_at        BIGINT NOT NULL,
    started_at         BIGINT,
    ended_at           BIGINT,
    exit_code          BIGINT,
    signal             BIGINT,
    termination_reason TEXT,
    detail             TEXT,
    stdout_bytes       BIGINT,
    stderr_bytes       BIGINT,
    wall_us            BIGINT,
    user_us            BIGINT,
    system_us          BIGINT,
    max_rss_kib        BIGINT,
    -- The promise: a request id runs once.
    UNIQUE (sandbox_id, request_id)
);

CREATE INDEX commands_by_sandbox ON commands (sandbox_id, seq);
CREATE INDEX commands_unfinished ON commands (sandbox_id) WHERE status IN ('accepted', 'running');

-- Append-only. Each organization's lines are a chain of hashes, so that a removed or changed line shows.
CREATE TABLE events (
    seq              INTEGER PRIMARY KEY AUTOINCREMENT,
    id               TEXT NOT NULL UNIQUE,
    org              TEXT NOT NULL,
    at               BIGINT NOT NULL,
    kind             TEXT NOT NULL,
    actor            TEXT NOT NULL,
    sandbox_id       TEXT,
    command_id       TEXT,
    template_version TEXT,
    data             TEXT NOT NULL,
    prev_hash        TEXT NOT NULL,
    hash             TEXT NOT NULL
);

CREATE INDEX events_by_org ON events (org, seq);
CREATE INDEX events_by_sandbox ON events (sandbox_id, seq);
-- Metering of a sandbox stops once.
CREATE UNIQUE INDEX events_usage_stopped ON events (sandbox_id) WHERE kind = 'usage.stopped';
