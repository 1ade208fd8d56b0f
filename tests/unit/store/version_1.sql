-- The database of version 1, as the first release of the service made it (SQLite).
-- Never edit this file: it is what migrations have to be able to read.
CREATE TABLE schema_version ( version BIGINT NOT NULL );
CREATE TABLE sessions ( id TEXT NOT NULL, tenant TEXT NOT NULL, created_at DOUBLE NOT NULL, seen_at DOUBLE NOT NULL, tags TEXT NOT NULL, user_metadata TEXT NOT NULL, sdk_version TEXT NOT NULL, project_id TEXT, display_name TEXT, finished TEXT, PRIMARY KEY (id) );
CREATE INDEX sessions_by_tenant ON sessions (tenant, created_at, id);
CREATE INDEX sessions_unfinished ON sessions (seen_at) WHERE finished IS NULL;
CREATE TABLE runs ( id TEXT NOT NULL, tenant TEXT NOT NULL, session_id TEXT NOT NULL, base_model TEXT NOT NULL, rank BIGINT NOT NULL, seed TEXT NOT NULL, train_attn BOOLEAN NOT NULL, train_mlp BOOLEAN NOT NULL, train_unembed BOOLEAN NOT NULL, created_at DOUBLE NOT NULL, last_request_at DOUBLE NOT NULL, user_metadata TEXT, is_unloaded BOOLEAN NOT NULL, snapshot TEXT, snapshot_seq BIGINT NOT NULL, PRIMARY KEY (id) );
CREATE INDEX runs_by_tenant ON runs (tenant, created_at, id);
CREATE INDEX ix_runs_session_id ON runs (session_id);
CREATE TABLE operations ( request_id TEXT NOT NULL, run_id TEXT NOT NULL, tenant TEXT NOT NULL, seq_id BIGINT NOT NULL, kind TEXT NOT NULL, digest TEXT NOT NULL, state TEXT NOT NULL, created_at DOUBLE NOT NULL, finished_at DOUBLE, cost_tokens BIGINT NOT NULL, error TEXT, category TEXT, result_type TEXT, options TEXT NOT NULL, PRIMARY KEY (request_id), CONSTRAINT operations_once UNIQUE (run_id, seq_id) );
CREATE INDEX operations_queued ON operations (run_id, seq_id) WHERE state = 'queued';
CREATE TABLE payloads ( request_id TEXT NOT NULL, part TEXT NOT NULL, at DOUBLE NOT NULL, content BLOB, file TEXT, PRIMARY KEY (request_id, part) );
CREATE INDEX payloads_results ON payloads (at) WHERE part = 'result';
CREATE INDEX payloads_files ON payloads (file) WHERE file IS NOT NULL;
CREATE TABLE samplers ( id TEXT NOT NULL, tenant TEXT NOT NULL, session_id TEXT NOT NULL, base_model TEXT NOT NULL, created_at DOUBLE NOT NULL, model_path TEXT, folder TEXT, clients BIGINT NOT NULL, PRIMARY KEY (id) );
CREATE INDEX ix_samplers_session_id ON samplers (session_id);
CREATE TABLE checkpoints ( path TEXT NOT NULL, tenant TEXT NOT NULL, run_id TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, folder TEXT NOT NULL, base_model TEXT NOT NULL, rank BIGINT NOT NULL, train_attn BOOLEAN NOT NULL, train_mlp BOOLEAN NOT NULL, train_unembed BOOLEAN NOT NULL, created_at DOUBLE NOT NULL, size_bytes BIGINT NOT NULL, files TEXT NOT NULL, has_optimizer BOOLEAN NOT NULL, expires_at DOUBLE, is_public BOOLEAN NOT NULL, user_metadata TEXT, PRIMARY KEY (path) );
CREATE INDEX ix_checkpoints_run_id ON checkpoints (run_id);
CREATE INDEX checkpoints_by_tenant ON checkpoints (tenant, created_at, path);
CREATE INDEX ix_checkpoints_expires_at ON checkpoints (expires_at);
CREATE TABLE keys ( id TEXT NOT NULL, sha256 TEXT NOT NULL, tenant TEXT NOT NULL, name TEXT NOT NULL, hint TEXT NOT NULL, created_at DOUBLE NOT NULL, revoked_at DOUBLE, PRIMARY KEY (id), UNIQUE (sha256) );
CREATE TABLE audit ( id TEXT NOT NULL, at DOUBLE NOT NULL, tenant TEXT NOT NULL, action TEXT NOT NULL, target TEXT NOT NULL, detail TEXT NOT NULL, PRIMARY KEY (id) );
CREATE INDEX audit_by_tenant ON audit (tenant, at, id);
CREATE TABLE answers ( tenant TEXT NOT NULL, "key" TEXT NOT NULL, answer BLOB NOT NULL, at DOUBLE NOT NULL, PRIMARY KEY (tenant, "key") );
CREATE INDEX ix_answers_at ON answers (at);
INSERT INTO schema_version VALUES (1);
