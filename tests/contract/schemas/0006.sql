-- Made by the coordinator of commit d78c68c: jobs that ended, were cancelled, run, and wait.
BEGIN TRANSACTION;
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);
INSERT INTO "alembic_version" VALUES('0006');
CREATE TABLE coordinators (
	owner VARCHAR(64) NOT NULL, 
	clock FLOAT NOT NULL, 
	CONSTRAINT pk_coordinators PRIMARY KEY (owner)
);
INSERT INTO "coordinators" VALUES('coordinator-a44f1ce0c0a45cff',2.30991738899865595158e+00);
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
INSERT INTO "events" VALUES('job-c20df40b21',1,1.79562711939395022392e+09,'submitted','1 x 1 ranks',0);
INSERT INTO "events" VALUES('job-c20df40b21',2,1.79562711945604705811e+09,'placed','placed on node-0000',1);
INSERT INTO "events" VALUES('job-c20df40b21',3,1.79562711953943228721e+09,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO "events" VALUES('job-c20df40b21',4,1.79562711953943228721e+09,'rank_started','rank 0 on node node-0000 started',1);
INSERT INTO "events" VALUES('job-c20df40b21',5,1.79562711953943228721e+09,'rank_exited','rank 0 on node node-0000 exited with code 0',1);
INSERT INTO "events" VALUES('job-c20df40b21',6,1.79562711953943228721e+09,'node_stopped','nothing of the job is left on node node-0000',1);
INSERT INTO "events" VALUES('job-c20df40b21',7,1.79562711953943228721e+09,'state','STOPPING: 1 rank ended with exit code 0',1);
INSERT INTO "events" VALUES('job-c20df40b21',8,1.79562711953943228721e+09,'state','SUCCEEDED: 1 rank ended with exit code 0',1);
INSERT INTO "events" VALUES('job-e65754f2a3',1,1.7956271196270427704e+09,'submitted','1 x 1 ranks',0);
INSERT INTO "events" VALUES('job-e65754f2a3',2,1.79562711963393092156e+09,'placed','placed on node-0000',1);
INSERT INTO "events" VALUES('job-e65754f2a3',3,1.79562711967107868195e+09,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO "events" VALUES('job-e65754f2a3',4,1.79562711967107868195e+09,'rank_started','rank 0 on node node-0000 started',1);
INSERT INTO "events" VALUES('job-e65754f2a3',5,1.79562711967107868195e+09,'state','RUNNING: 1 rank started',1);
INSERT INTO "events" VALUES('job-e65754f2a3',6,1.79562711970839071276e+09,'cancel_requested','cancelled',1);
INSERT INTO "events" VALUES('job-e65754f2a3',7,1.79562711970839071276e+09,'state','STOPPING: cancelled',1);
INSERT INTO "events" VALUES('job-e65754f2a3',8,1.79562711972624039656e+09,'rank_exited','rank 0 on node node-0000 was killed by SIGTERM',1);
INSERT INTO "events" VALUES('job-e65754f2a3',9,1.79562711972624039656e+09,'node_stopped','nothing of the job is left on node node-0000',1);
INSERT INTO "events" VALUES('job-e65754f2a3',10,1.79562711972624039656e+09,'state','CANCELLED: cancelled',1);
INSERT INTO "events" VALUES('job-6a0bb795da',1,1.7956271198071687221e+09,'submitted','2 x 2 ranks',0);
INSERT INTO "events" VALUES('job-6a0bb795da',2,1.7956271198138678074e+09,'placed','placed on node-0000, node-0001',1);
INSERT INTO "events" VALUES('job-6a0bb795da',3,1.79562711985383892062e+09,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO "events" VALUES('job-6a0bb795da',4,1.79562711985383892062e+09,'rank_started','ranks 0-1 on node node-0000 started',1);
INSERT INTO "events" VALUES('job-6a0bb795da',5,1.79562711985383892062e+09,'engine_ready','the engine of node node-0001 listens on 127.0.0.1:10001',1);
INSERT INTO "events" VALUES('job-6a0bb795da',6,1.79562711985383892062e+09,'rank_started','ranks 2-3 on node node-0001 started',1);
INSERT INTO "events" VALUES('job-6a0bb795da',7,1.79562711985383892062e+09,'state','RUNNING: all 4 ranks started',1);
INSERT INTO "events" VALUES('job-9d2a644c17',1,1.79562711990531277649e+09,'submitted','9 x 9 ranks',0);
INSERT INTO "events" VALUES('job-9d2a644c17',2,1.79562711993331241611e+09,'waiting','needs 9 nodes with 9 free slots each; connected: node-0000 (2 of 4 free), node-0001 (2 of 4 free)',0);
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
INSERT INTO "job_hosts" VALUES('job-c20df40b21',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,1,3,'127.0.0.1:10000','',0.0,'','',0.0,'',0,0,1,0,0,0,0.0,'[[3,1000,0,0,"","/var/lib/bagua/node/jobs/job-c20df40b21/rank-0.log",1795627119.5259993,1.9159057300003042,false,-1,false,false,false]]');
INSERT INTO "job_hosts" VALUES('job-e65754f2a3',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,1,3,'127.0.0.1:10000','',0.0,'','',0.0,'',0,0,1,0,0,0,0.0,'[[3,1000,-15,15,"","/var/lib/bagua/node/jobs/job-e65754f2a3/rank-0.log",1795627119.7239988,2.102713746000518,false,-1,false,false,false]]');
INSERT INTO "job_hosts" VALUES('job-6a0bb795da',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,2,2,'127.0.0.1:10000','',0.0,'','',0.0,'',0,0,1,0,0,0,0.0,'[[2,1000,0,0,"","/var/lib/bagua/node/jobs/job-6a0bb795da/rank-0.log",0.0,0.0,false,-1,false,false,false],[2,1001,0,0,"","/var/lib/bagua/node/jobs/job-6a0bb795da/rank-1.log",0.0,0.0,false,-1,false,false,false]]');
INSERT INTO "job_hosts" VALUES('job-6a0bb795da',1,'node-0001','node-0001','127.0.0.1','boot-of-node-0001',2,2,2,'127.0.0.1:10001','',0.0,'','',0.0,'',0,0,1,0,0,0,0.0,'[[2,1002,0,0,"","/var/lib/bagua/node/jobs/job-6a0bb795da/rank-2.log",0.0,0.0,false,-1,false,false,false],[2,1003,0,0,"","/var/lib/bagua/node/jobs/job-6a0bb795da/rank-3.log",0.0,0.0,false,-1,false,false,false]]');
CREATE TABLE job_specs (
	job_id VARCHAR(64) NOT NULL, 
	spec BLOB NOT NULL, 
	CONSTRAINT pk_job_specs PRIMARY KEY (job_id), 
	CONSTRAINT fk_job_specs_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
INSERT INTO "job_specs" VALUES('job-c20df40b21',X'0A05656E64656412092F62696E2F7472756520014001480159000000000018F54061000000000000F03F');
INSERT INTO "job_specs" VALUES('job-e65754f2a3',X'0A0963616E63656C6C65641205747261696E200132060A01411201624001480159000000000018F54061000000000000F03F');
INSERT INTO "job_specs" VALUES('job-6a0bb795da',X'0A0772756E6E696E671205747261696E20014002480259000000000018F54061000000000000F03F');
INSERT INTO "job_specs" VALUES('job-9d2a644c17',X'0A0777616974696E671205747261696E20014009480959000000000018F54061000000000000F03F');
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
INSERT INTO "jobs" VALUES('job-c20df40b21','a key','ended',X'0A05656E64656412092F62696E2F74727565200140014801',5,'1 rank ended with exit code 0',5,NULL,1,1.79562711939395022392e+09,0.0,1.79562711953943228721e+09,1.7704265029988164315e+00,1.83252027500020631123e+00,1.9159057300003041746e+00,0,0,0,0,1,0,0.0,'','127.0.0.1',29488,X'827C6AB1D7658CC5F54C7C075D821501D453B81B4405E288758598CFF7A5EF6A',8,4,'coordinator-a44f1ce0c0a45cff');
INSERT INTO "jobs" VALUES('job-e65754f2a3',NULL,'cancelled',X'0A0963616E63656C6C65641205747261696E200140014801',7,'cancelled',7,'cancelled',1,1.7956271196270427704e+09,1.79562711967107868195e+09,1.79562711972624039656e+09,2.00351916299950971733e+00,2.01040495400047802831e+00,2.08486418800021056085e+00,0,0,0,0,1,0,0.0,'','127.0.0.1',21964,X'88DBF6889520D413F7D5031764C47B02814ED024D0143864FE0CD33EB08E3C87',10,6,'coordinator-a44f1ce0c0a45cff');
INSERT INTO "jobs" VALUES('job-6a0bb795da',NULL,'running',X'0A0772756E6E696E671205747261696E200140024802',3,'all 4 ranks started',NULL,NULL,1,1.7956271198071687221e+09,1.79562711985383892062e+09,0.0,2.18364560900045034941e+00,2.19034125899997889064e+00,0.0,0,0,0,0,4,0,0.0,'','127.0.0.1',24835,X'3DAADFB0BE119A54D8DCADAB09E53ECFA514FA9B2245C7AEDA1D1E6E83B4F0A3',7,4,'coordinator-a44f1ce0c0a45cff');
INSERT INTO "jobs" VALUES('job-9d2a644c17',NULL,'waiting',X'0A0777616974696E671205747261696E200140094809',1,'needs 9 nodes with 9 free slots each; connected: node-0000 (2 of 4 free), node-0001 (2 of 4 free)',NULL,NULL,0,1.79562711990531277649e+09,0.0,0.0,2.28178698399824497755e+00,0.0,0.0,0,0,0,0,0,0,0.0,'','',30573,X'B0253AC3BBA69AB2C67D61423EB89773BFA034C1CD211C430B358742CBD3BEDC',2,2,'coordinator-a44f1ce0c0a45cff');
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
INSERT INTO "nodes" VALUES('node-0000','node-0000','127.0.0.1',4,'rig','boot-of-node-0000',1.79562711933506488799e+09,'coordinator-a44f1ce0c0a45cff',0,0);
INSERT INTO "nodes" VALUES('node-0001','node-0001','127.0.0.1',4,'rig','boot-of-node-0001',1.79562711933506488799e+09,'coordinator-a44f1ce0c0a45cff',0,0);
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
CREATE INDEX ix_jobs_finished_at ON jobs (finished_at);
CREATE INDEX ix_jobs_created_at_job_id ON jobs (created_at, job_id);
CREATE INDEX ix_tune_studies_job_id ON tune_studies (job_id);
CREATE INDEX ix_job_hosts_node_id_phase ON job_hosts (node_id, phase);
COMMIT;
