-- Made by the coordinator of commit 0c8a46d: jobs that ended, were cancelled, run, and wait.
BEGIN TRANSACTION;
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);
INSERT INTO "alembic_version" VALUES('0007');
CREATE TABLE code_archives (
	digest VARCHAR(64) NOT NULL, 
	bytes INTEGER NOT NULL, 
	complete BOOLEAN NOT NULL, 
	used_at FLOAT NOT NULL, 
	CONSTRAINT pk_code_archives PRIMARY KEY (digest)
);
CREATE TABLE code_pieces (
	digest VARCHAR(64) NOT NULL, 
	number INTEGER NOT NULL, 
	data BLOB NOT NULL, 
	CONSTRAINT pk_code_pieces PRIMARY KEY (digest, number), 
	CONSTRAINT fk_code_pieces_digest FOREIGN KEY(digest) REFERENCES code_archives (digest) ON DELETE CASCADE
);
CREATE TABLE coordinators (
	owner VARCHAR(64) NOT NULL, 
	clock FLOAT NOT NULL, 
	CONSTRAINT pk_coordinators PRIMARY KEY (owner)
);
INSERT INTO "coordinators" VALUES('coordinator-12d42bfc5b62122e',2.80229338200115307699e+00);
CREATE TABLE events (
	job_id VARCHAR(64) NOT NULL, 
	seq INTEGER NOT NULL, 
	time FLOAT NOT NULL, 
	kind VARCHAR(64) NOT NULL, 
	reason TEXT NOT NULL, 
	generation INTEGER NOT NULL, 
	CONSTRAINT pk_events PRIMARY KEY (job_id, seq), 
	CONSTRAINT fk_events_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
INSERT INTO "events" VALUES('job-49ec6d7731',1,1.79562710853783869739e+09,'submitted','1 x 1 ranks',0);
INSERT INTO "events" VALUES('job-49ec6d7731',2,1.79562710855976152423e+09,'placed','placed on node-0000',1);
INSERT INTO "events" VALUES('job-49ec6d7731',3,1.79562710860486364362e+09,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO "events" VALUES('job-49ec6d7731',4,1.79562710860486364362e+09,'rank_started','rank 0 on node node-0000 started',1);
INSERT INTO "events" VALUES('job-49ec6d7731',5,1.79562710860486364362e+09,'rank_exited','rank 0 on node node-0000 exited with code 0',1);
INSERT INTO "events" VALUES('job-49ec6d7731',6,1.79562710860486364362e+09,'node_stopped','nothing of the job is left on node node-0000',1);
INSERT INTO "events" VALUES('job-49ec6d7731',7,1.79562710860486364362e+09,'state','STOPPING: 1 rank ended with exit code 0',1);
INSERT INTO "events" VALUES('job-49ec6d7731',8,1.79562710860486364362e+09,'state','SUCCEEDED: 1 rank ended with exit code 0',1);
INSERT INTO "events" VALUES('job-cced8acb7a',1,1.79562710864582777024e+09,'submitted','1 x 1 ranks',0);
INSERT INTO "events" VALUES('job-cced8acb7a',2,1.79562710867408490181e+09,'placed','placed on node-0000',1);
INSERT INTO "events" VALUES('job-cced8acb7a',3,1.79562710871117949484e+09,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO "events" VALUES('job-cced8acb7a',4,1.79562710871117949484e+09,'rank_started','rank 0 on node node-0000 started',1);
INSERT INTO "events" VALUES('job-cced8acb7a',5,1.79562710871117949484e+09,'state','RUNNING: 1 rank started',1);
INSERT INTO "events" VALUES('job-cced8acb7a',6,1.79562710877787017819e+09,'cancel_requested','cancelled',1);
INSERT INTO "events" VALUES('job-cced8acb7a',7,1.79562710877787017819e+09,'state','STOPPING: cancelled',1);
INSERT INTO "events" VALUES('job-cced8acb7a',8,1.79562710880144333841e+09,'rank_exited','rank 0 on node node-0000 was killed by SIGTERM',1);
INSERT INTO "events" VALUES('job-cced8acb7a',9,1.79562710880144333841e+09,'node_stopped','nothing of the job is left on node node-0000',1);
INSERT INTO "events" VALUES('job-cced8acb7a',10,1.79562710880144333841e+09,'state','CANCELLED: cancelled',1);
INSERT INTO "events" VALUES('job-9d6d9b22ae',1,1.79562710890928292272e+09,'submitted','2 x 2 ranks',0);
INSERT INTO "events" VALUES('job-9d6d9b22ae',2,1.79562710892586708069e+09,'placed','placed on node-0000, node-0001',1);
INSERT INTO "events" VALUES('job-9d6d9b22ae',3,1.79562710898115134236e+09,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO "events" VALUES('job-9d6d9b22ae',4,1.79562710898115134236e+09,'rank_started','ranks 0-1 on node node-0000 started',1);
INSERT INTO "events" VALUES('job-9d6d9b22ae',5,1.79562710898115134236e+09,'engine_ready','the engine of node node-0001 listens on 127.0.0.1:10001',1);
INSERT INTO "events" VALUES('job-9d6d9b22ae',6,1.79562710898115134236e+09,'rank_started','ranks 2-3 on node node-0001 started',1);
INSERT INTO "events" VALUES('job-9d6d9b22ae',7,1.79562710898115134236e+09,'state','RUNNING: all 4 ranks started',1);
INSERT INTO "events" VALUES('job-50795fcde7',1,1.795627109034954071e+09,'submitted','9 x 9 ranks',0);
INSERT INTO "events" VALUES('job-50795fcde7',2,1.79562710904523420334e+09,'waiting','needs 9 nodes with 9 free slots each; connected: node-0000 (2 of 4 free), node-0001 (2 of 4 free)',0);
CREATE TABLE job_code (
	job_id VARCHAR(64) NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	CONSTRAINT pk_job_code PRIMARY KEY (job_id), 
	CONSTRAINT fk_job_code_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
CREATE TABLE job_hosts (
	job_id VARCHAR(64) NOT NULL, 
	host_index INTEGER NOT NULL, 
	node_id VARCHAR(200) NOT NULL, 
	hostname VARCHAR(255) NOT NULL, 
	address VARCHAR(255) NOT NULL, 
	boot_id VARCHAR(200) NOT NULL, 
	first_rank INTEGER NOT NULL, 
	nranks INTEGER NOT NULL, 
	phase INTEGER NOT NULL, 
	engine_address TEXT NOT NULL, 
	error TEXT NOT NULL, 
	error_clock FLOAT NOT NULL, 
	waiting TEXT NOT NULL, 
	suspended TEXT DEFAULT '' NOT NULL, 
	suspended_clock FLOAT DEFAULT '0' NOT NULL, 
	lost_hosts TEXT DEFAULT '' NOT NULL, 
	withdrawn BOOLEAN DEFAULT 0 NOT NULL, 
	last_generation INTEGER DEFAULT '0' NOT NULL, 
	entered INTEGER DEFAULT '0' NOT NULL, 
	takes_newcomers BOOLEAN DEFAULT 0 NOT NULL, 
	joining BOOLEAN DEFAULT 0 NOT NULL, 
	dismissed BOOLEAN DEFAULT 0 NOT NULL, 
	since_clock FLOAT DEFAULT '0' NOT NULL, 
	ranks TEXT NOT NULL, 
	CONSTRAINT pk_job_hosts PRIMARY KEY (job_id, host_index), 
	CONSTRAINT fk_job_hosts_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
INSERT INTO "job_hosts" VALUES('job-49ec6d7731',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,1,3,'127.0.0.1:10000','',0.0,'','',0.0,'',0,0,1,0,0,0,0.0,'[[3,1000,0,0,"","/var/lib/bagua/node/jobs/job-49ec6d7731/rank-0.log",1795627108.5788574,2.361806967999655,false,-1,false,false,false]]');
INSERT INTO "job_hosts" VALUES('job-cced8acb7a',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,1,3,'127.0.0.1:10000','',0.0,'','',0.0,'',0,0,1,0,0,0,0.0,'[[3,1000,-15,15,"","/var/lib/bagua/node/jobs/job-cced8acb7a/rank-0.log",1795627108.7983906,2.558386667000377,false,-1,false,false,false]]');
INSERT INTO "job_hosts" VALUES('job-9d6d9b22ae',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,2,2,'127.0.0.1:10000','',0.0,'','',0.0,'',0,0,1,0,0,0,0.0,'[[2,1000,0,0,"","/var/lib/bagua/node/jobs/job-9d6d9b22ae/rank-0.log",0.0,0.0,false,-1,false,false,false],[2,1001,0,0,"","/var/lib/bagua/node/jobs/job-9d6d9b22ae/rank-1.log",0.0,0.0,false,-1,false,false,false]]');
INSERT INTO "job_hosts" VALUES('job-9d6d9b22ae',1,'node-0001','node-0001','127.0.0.1','boot-of-node-0001',2,2,2,'127.0.0.1:10001','',0.0,'','',0.0,'',0,0,1,0,0,0,0.0,'[[2,1002,0,0,"","/var/lib/bagua/node/jobs/job-9d6d9b22ae/rank-2.log",0.0,0.0,false,-1,false,false,false],[2,1003,0,0,"","/var/lib/bagua/node/jobs/job-9d6d9b22ae/rank-3.log",0.0,0.0,false,-1,false,false,false]]');
CREATE TABLE job_specs (
	job_id VARCHAR(64) NOT NULL, 
	spec BLOB NOT NULL, 
	CONSTRAINT pk_job_specs PRIMARY KEY (job_id), 
	CONSTRAINT fk_job_specs_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
INSERT INTO "job_specs" VALUES('job-49ec6d7731',X'0A05656E64656412092F62696E2F7472756520014001480159000000000018F54061000000000000F03F');
INSERT INTO "job_specs" VALUES('job-cced8acb7a',X'0A0963616E63656C6C65641205747261696E200132060A01411201624001480159000000000018F54061000000000000F03F');
INSERT INTO "job_specs" VALUES('job-9d6d9b22ae',X'0A0772756E6E696E671205747261696E20014002480259000000000018F54061000000000000F03F');
INSERT INTO "job_specs" VALUES('job-50795fcde7',X'0A0777616974696E671205747261696E20014009480959000000000018F54061000000000000F03F');
CREATE TABLE jobs (
	job_id VARCHAR(64) NOT NULL, 
	idempotency_key VARCHAR(200), 
	name VARCHAR(200) NOT NULL, 
	brief BLOB DEFAULT '' NOT NULL, 
	state INTEGER NOT NULL, 
	reason TEXT NOT NULL, 
	outcome INTEGER, 
	cancel_reason TEXT, 
	generation INTEGER NOT NULL, 
	created_at FLOAT NOT NULL, 
	started_at FLOAT NOT NULL, 
	finished_at FLOAT NOT NULL, 
	submitted_clock FLOAT NOT NULL, 
	placed_clock FLOAT NOT NULL, 
	stopping_clock FLOAT NOT NULL, 
	stalls INTEGER DEFAULT '0' NOT NULL, 
	"plan" INTEGER DEFAULT '0' NOT NULL, 
	wanted_nodes INTEGER DEFAULT '0' NOT NULL, 
	paused BOOLEAN DEFAULT 0 NOT NULL, 
	next_member INTEGER DEFAULT '0' NOT NULL, 
	failures INTEGER DEFAULT '0' NOT NULL, 
	retry_clock FLOAT DEFAULT '0' NOT NULL, 
	respawns TEXT DEFAULT '' NOT NULL, 
	master_addr VARCHAR(255) NOT NULL, 
	master_port INTEGER NOT NULL, 
	job_key BLOB NOT NULL, 
	last_event INTEGER NOT NULL, 
	revision INTEGER NOT NULL, 
	lease_owner VARCHAR(64), 
	CONSTRAINT pk_jobs PRIMARY KEY (job_id), 
	CONSTRAINT uq_jobs_idempotency_key UNIQUE (idempotency_key)
);
INSERT INTO "jobs" VALUES('job-49ec6d7731','a key','ended',X'0A05656E64656412092F62696E2F74727565200140014801',5,'1 rank ended with exit code 0',5,NULL,1,1.79562710853783869739e+09,0.0,1.79562710860486364362e+09,2.29478576300061831716e+00,2.31670461400062777101e+00,2.36180696799965517129e+00,0,0,0,0,1,0,0.0,'','127.0.0.1',30566,X'D7CD14DE1D17317B428B8C276AD2BC3F1FBE5A14874EAA2D82325909F77320FD',8,4,'coordinator-12d42bfc5b62122e');
INSERT INTO "jobs" VALUES('job-cced8acb7a',NULL,'cancelled',X'0A0963616E63656C6C65641205747261696E200140014801',7,'cancelled',7,'cancelled',1,1.79562710864582777024e+09,1.79562710871117949484e+09,1.79562710880144333841e+09,2.40277439199962827842e+00,2.43102845000066736247e+00,2.53481347699926118366e+00,0,0,0,0,1,0,0.0,'','127.0.0.1',28174,X'EFAB6D609C350AB0A0138E4A98F3B7F1134956F7AF2FF4FB6EBCA6271E2928E5',10,6,'coordinator-12d42bfc5b62122e');
INSERT INTO "jobs" VALUES('job-9d6d9b22ae',NULL,'running',X'0A0772756E6E696E671205747261696E200140024802',3,'all 4 ranks started',NULL,NULL,1,1.79562710890928292272e+09,1.79562710898115134236e+09,0.0,2.66622776700023678131e+00,2.68280821699954685755e+00,0.0,0,0,0,0,4,0,0.0,'','127.0.0.1',29505,X'4DCA66058C17ADE428B4F0F2C7D1BBB9E00BD8EF534E2B0FB1B69FCD6ECC7626',7,4,'coordinator-12d42bfc5b62122e');
INSERT INTO "jobs" VALUES('job-50795fcde7',NULL,'waiting',X'0A0777616974696E671205747261696E200140094809',1,'needs 9 nodes with 9 free slots each; connected: node-0000 (2 of 4 free), node-0001 (2 of 4 free)',NULL,NULL,0,1.795627109034954071e+09,0.0,0.0,2.79189843700078199617e+00,0.0,0.0,0,0,0,0,0,0,0.0,'','',24073,X'C84A51D576964FDEBBD286D061576F1FF85D9058A2C225D380C47DE0A8785F79',2,2,'coordinator-12d42bfc5b62122e');
CREATE TABLE nodes (
	node_id VARCHAR(200) NOT NULL, 
	hostname VARCHAR(255) NOT NULL, 
	address VARCHAR(255) NOT NULL, 
	slots INTEGER NOT NULL, 
	version VARCHAR(64) NOT NULL, 
	boot_id VARCHAR(200) NOT NULL, 
	last_seen FLOAT NOT NULL, 
	owner VARCHAR(64), 
	draining BOOLEAN DEFAULT 0 NOT NULL, 
	leaving BOOLEAN DEFAULT 0 NOT NULL, 
	CONSTRAINT pk_nodes PRIMARY KEY (node_id)
);
INSERT INTO "nodes" VALUES('node-0001','node-0001','127.0.0.1',4,'rig','boot-of-node-0001',1.79562710847659468653e+09,'coordinator-12d42bfc5b62122e',0,0);
INSERT INTO "nodes" VALUES('node-0000','node-0000','127.0.0.1',4,'rig','boot-of-node-0000',1.7956271084924247265e+09,'coordinator-12d42bfc5b62122e',0,0);
CREATE TABLE tune_studies (
	study_id VARCHAR(64) NOT NULL, 
	study BLOB NOT NULL, 
	settled BOOLEAN NOT NULL, 
	best TEXT NOT NULL, 
	line TEXT NOT NULL, 
	job_id VARCHAR(64) NOT NULL, 
	updated_at FLOAT NOT NULL, 
	CONSTRAINT pk_tune_studies PRIMARY KEY (study_id)
);
CREATE TABLE tune_trials (
	study_id VARCHAR(64) NOT NULL, 
	job_id VARCHAR(64) NOT NULL, 
	number INTEGER NOT NULL, 
	time FLOAT NOT NULL, 
	trial BLOB NOT NULL, 
	CONSTRAINT pk_tune_trials PRIMARY KEY (study_id, job_id, number), 
	CONSTRAINT fk_tune_trials_study_id FOREIGN KEY(study_id) REFERENCES tune_studies (study_id) ON DELETE CASCADE
);
CREATE INDEX ix_jobs_state_created_at ON jobs (state, created_at);
CREATE INDEX ix_jobs_created_at_job_id ON jobs (created_at, job_id);
CREATE INDEX ix_jobs_finished_at ON jobs (finished_at);
CREATE INDEX ix_tune_studies_job_id ON tune_studies (job_id);
CREATE INDEX ix_job_hosts_node_id_phase ON job_hosts (node_id, phase);
CREATE INDEX ix_job_code_digest ON job_code (digest);
COMMIT;
