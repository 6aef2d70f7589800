-- Made by the coordinator of commit a79237a: jobs that ended, were cancelled, run, and wait.
BEGIN TRANSACTION;
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);
INSERT INTO "alembic_version" VALUES('0004');
CREATE TABLE coordinators (
	owner VARCHAR(64) NOT NULL, 
	clock FLOAT NOT NULL, 
	CONSTRAINT pk_coordinators PRIMARY KEY (owner)
);
INSERT INTO "coordinators" VALUES('coordinator-752fa6c54b3c083c',2.60906375699960335623e+00);
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
INSERT INTO "events" VALUES('job-7faed9a989',1,1.79562664776999187472e+09,'submitted','1 x 1 ranks',0);
INSERT INTO "events" VALUES('job-7faed9a989',2,1.79562664778801202771e+09,'placed','placed on node-0000',1);
INSERT INTO "events" VALUES('job-7faed9a989',3,1.79562664784264183043e+09,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO "events" VALUES('job-7faed9a989',4,1.79562664784264183043e+09,'rank_started','rank 0 on node node-0000 started',1);
INSERT INTO "events" VALUES('job-7faed9a989',5,1.79562664784264183043e+09,'rank_exited','rank 0 on node node-0000 exited with code 0',1);
INSERT INTO "events" VALUES('job-7faed9a989',6,1.79562664784264183043e+09,'node_stopped','nothing of the job is left on node node-0000',1);
INSERT INTO "events" VALUES('job-7faed9a989',7,1.79562664784264183043e+09,'state','STOPPING: 1 rank ended with exit code 0',1);
INSERT INTO "events" VALUES('job-7faed9a989',8,1.79562664784264183043e+09,'state','SUCCEEDED: 1 rank ended with exit code 0',1);
INSERT INTO "events" VALUES('job-2b22487499',1,1.79562664789623141286e+09,'submitted','1 x 1 ranks',0);
INSERT INTO "events" VALUES('job-2b22487499',2,1.79562664792854809756e+09,'placed','placed on node-0000',1);
INSERT INTO "events" VALUES('job-2b22487499',3,1.79562664795904874796e+09,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO "events" VALUES('job-2b22487499',4,1.79562664795904874796e+09,'rank_started','rank 0 on node node-0000 started',1);
INSERT INTO "events" VALUES('job-2b22487499',5,1.79562664795904874796e+09,'state','RUNNING: 1 rank started',1);
INSERT INTO "events" VALUES('job-2b22487499',6,1.79562664800542259218e+09,'cancel_requested','cancelled',1);
INSERT INTO "events" VALUES('job-2b22487499',7,1.79562664800542259218e+09,'state','STOPPING: cancelled',1);
INSERT INTO "events" VALUES('job-2b22487499',8,1.79562664803033065789e+09,'rank_exited','rank 0 on node node-0000 was killed by SIGTERM',1);
INSERT INTO "events" VALUES('job-2b22487499',9,1.79562664803033065789e+09,'node_stopped','nothing of the job is left on node node-0000',1);
INSERT INTO "events" VALUES('job-2b22487499',10,1.79562664803033065789e+09,'state','CANCELLED: cancelled',1);
INSERT INTO "events" VALUES('job-14e5b795a9',1,1.79562664810587263109e+09,'submitted','2 x 2 ranks',0);
INSERT INTO "events" VALUES('job-14e5b795a9',2,1.79562664813013386725e+09,'placed','placed on node-0000, node-0001',1);
INSERT INTO "events" VALUES('job-14e5b795a9',3,1.79562664817848682404e+09,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO "events" VALUES('job-14e5b795a9',4,1.79562664817848682404e+09,'rank_started','ranks 0-1 on node node-0000 started',1);
INSERT INTO "events" VALUES('job-14e5b795a9',5,1.79562664817848682404e+09,'engine_ready','the engine of node node-0001 listens on 127.0.0.1:10001',1);
INSERT INTO "events" VALUES('job-14e5b795a9',6,1.79562664817848682404e+09,'rank_started','ranks 2-3 on node node-0001 started',1);
INSERT INTO "events" VALUES('job-14e5b795a9',7,1.79562664817848682404e+09,'state','RUNNING: all 4 ranks started',1);
INSERT INTO "events" VALUES('job-2c84d79e70',1,1.79562664826612877842e+09,'submitted','9 x 9 ranks',0);
INSERT INTO "events" VALUES('job-2c84d79e70',2,1.79562664829335379601e+09,'waiting','needs 9 nodes with 9 free slots each; connected: node-0000 (2 of 4 free), node-0001 (2 of 4 free)',0);
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
	ranks TEXT NOT NULL, 
	CONSTRAINT pk_job_hosts PRIMARY KEY (job_id, host_index), 
	CONSTRAINT fk_job_hosts_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
INSERT INTO "job_hosts" VALUES('job-7faed9a989',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,1,3,'127.0.0.1:10000','',0.0,'','',0.0,'',0,0,'[[3,1000,0,0,"","/var/lib/bagua/node/jobs/job-7faed9a989/rank-0.log",1795626647.8037138,2.1582471689998783,false,-1,false]]');
INSERT INTO "job_hosts" VALUES('job-2b22487499',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,1,3,'127.0.0.1:10000','',0.0,'','',0.0,'',0,0,'[[3,1000,-15,15,"","/var/lib/bagua/node/jobs/job-2b22487499/rank-0.log",1795626648.017274,2.3459342459991603,false,-1,false]]');
INSERT INTO "job_hosts" VALUES('job-14e5b795a9',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,2,2,'127.0.0.1:10000','',0.0,'','',0.0,'',0,0,'[[2,1000,0,0,"","/var/lib/bagua/node/jobs/job-14e5b795a9/rank-0.log",0.0,0.0,false,-1,false],[2,1001,0,0,"","/var/lib/bagua/node/jobs/job-14e5b795a9/rank-1.log",0.0,0.0,false,-1,false]]');
INSERT INTO "job_hosts" VALUES('job-14e5b795a9',1,'node-0001','node-0001','127.0.0.1','boot-of-node-0001',2,2,2,'127.0.0.1:10001','',0.0,'','',0.0,'',0,0,'[[2,1002,0,0,"","/var/lib/bagua/node/jobs/job-14e5b795a9/rank-2.log",0.0,0.0,false,-1,false],[2,1003,0,0,"","/var/lib/bagua/node/jobs/job-14e5b795a9/rank-3.log",0.0,0.0,false,-1,false]]');
CREATE TABLE job_specs (
	job_id VARCHAR(64) NOT NULL, 
	spec BLOB NOT NULL, 
	CONSTRAINT pk_job_specs PRIMARY KEY (job_id), 
	CONSTRAINT fk_job_specs_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
INSERT INTO "job_specs" VALUES('job-7faed9a989',X'0A05656E64656412092F62696E2F7472756520014001480159000000000018F54061000000000000F03F');
INSERT INTO "job_specs" VALUES('job-2b22487499',X'0A0963616E63656C6C65641205747261696E200132060A01411201624001480159000000000018F54061000000000000F03F');
INSERT INTO "job_specs" VALUES('job-14e5b795a9',X'0A0772756E6E696E671205747261696E20014002480259000000000018F54061000000000000F03F');
INSERT INTO "job_specs" VALUES('job-2c84d79e70',X'0A0777616974696E671205747261696E20014009480959000000000018F54061000000000000F03F');
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
	master_addr VARCHAR(255) NOT NULL, 
	master_port INTEGER NOT NULL, 
	job_key BLOB NOT NULL, 
	last_event INTEGER NOT NULL, 
	revision INTEGER NOT NULL, 
	lease_owner VARCHAR(64), 
	CONSTRAINT pk_jobs PRIMARY KEY (job_id), 
	CONSTRAINT uq_jobs_idempotency_key UNIQUE (idempotency_key)
);
INSERT INTO "jobs" VALUES('job-7faed9a989','a key','ended',X'0A05656E64656412092F62696E2F74727565200140014801',5,'1 rank ended with exit code 0',5,NULL,1,1.79562664776999187472e+09,0.0,1.79562664784264183043e+09,2.08560038299947336781e+00,2.10361722900051972828e+00,2.1582471689998783404e+00,0,'127.0.0.1',21030,X'23AA4C5651E2FA55F0041BCABB2884BC24CA88D5BBA8E47B5EAAB1074D3BC009',8,4,'coordinator-752fa6c54b3c083c');
INSERT INTO "jobs" VALUES('job-2b22487499',NULL,'cancelled',X'0A0963616E63656C6C65641205747261696E200140014801',7,'cancelled',7,'cancelled',1,1.79562664789623141286e+09,1.79562664795904874796e+09,1.79562664803033065789e+09,2.21184057000027678441e+00,2.24415394599964201916e+00,2.32102810399919690098e+00,0,'127.0.0.1',20313,X'84B5C013DB30C7F41F8056D57B21AFBF60774D1B5611EEB9B12742BFC066677E',10,6,'coordinator-752fa6c54b3c083c');
INSERT INTO "jobs" VALUES('job-14e5b795a9',NULL,'running',X'0A0772756E6E696E671205747261696E200140024802',3,'all 4 ranks started',NULL,NULL,1,1.79562664810587263109e+09,1.79562664817848682404e+09,0.0,2.42147895599919138476e+00,2.44573755599958531092e+00,0.0,0,'127.0.0.1',27271,X'06375F3F7EC30F5F702602831E3730D69D2E143B270763BCD5C247982F2F10E9',7,4,'coordinator-752fa6c54b3c083c');
INSERT INTO "jobs" VALUES('job-2c84d79e70',NULL,'waiting',X'0A0777616974696E671205747261696E200140094809',1,'needs 9 nodes with 9 free slots each; connected: node-0000 (2 of 4 free), node-0001 (2 of 4 free)',NULL,NULL,0,1.79562664826612877842e+09,0.0,0.0,2.58173666599941498134e+00,0.0,0.0,0,'',24766,X'A349357BF61BE53C347A1C3DFC7FBA15E3D6ED6486E48A79FC20F40A8D82A487',2,2,'coordinator-752fa6c54b3c083c');
CREATE TABLE nodes (
	node_id VARCHAR(200) NOT NULL, 
	hostname VARCHAR(255) NOT NULL, 
	address VARCHAR(255) NOT NULL, 
	slots INTEGER NOT NULL, 
	version VARCHAR(64) NOT NULL, 
	boot_id VARCHAR(200) NOT NULL, 
	last_seen FLOAT NOT NULL, 
	owner VARCHAR(64), 
	CONSTRAINT pk_nodes PRIMARY KEY (node_id)
);
INSERT INTO "nodes" VALUES('node-0000','node-0000','127.0.0.1',4,'rig','boot-of-node-0000',1.79562664770617556571e+09,'coordinator-752fa6c54b3c083c');
INSERT INTO "nodes" VALUES('node-0001','node-0001','127.0.0.1',4,'rig','boot-of-node-0001',1.79562664770617556571e+09,'coordinator-752fa6c54b3c083c');
CREATE INDEX ix_jobs_created_at_job_id ON jobs (created_at, job_id);
CREATE INDEX ix_jobs_finished_at ON jobs (finished_at);
CREATE INDEX ix_jobs_state_created_at ON jobs (state, created_at);
CREATE INDEX ix_job_hosts_node_id_phase ON job_hosts (node_id, phase);
COMMIT;
