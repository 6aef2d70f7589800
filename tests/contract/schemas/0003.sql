-- Made by the coordinator of commit 0edc39b: jobs that ended, were cancelled, run, and wait.
BEGIN TRANSACTION;
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);
INSERT INTO "alembic_version" VALUES('0003');
CREATE TABLE coordinators (
	owner VARCHAR(64) NOT NULL, 
	clock FLOAT NOT NULL, 
	CONSTRAINT pk_coordinators PRIMARY KEY (owner)
);
INSERT INTO "coordinators" VALUES('coordinator-30390a158f4f47af',2.1498523739992378978e+00);
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
INSERT INTO "events" VALUES('job-961ba98530',1,1.7956266428799431324e+09,'submitted','1 x 1 ranks',0);
INSERT INTO "events" VALUES('job-961ba98530',2,1.79562664290595960618e+09,'placed','placed on node-0000',1);
INSERT INTO "events" VALUES('job-961ba98530',3,1.79562664292566275597e+09,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO "events" VALUES('job-961ba98530',4,1.79562664292566275597e+09,'rank_started','rank 0 on node node-0000 started',1);
INSERT INTO "events" VALUES('job-961ba98530',5,1.79562664292566275597e+09,'rank_exited','rank 0 on node node-0000 exited with code 0',1);
INSERT INTO "events" VALUES('job-961ba98530',6,1.79562664292566275597e+09,'node_stopped','nothing of the job is left on node node-0000',1);
INSERT INTO "events" VALUES('job-961ba98530',7,1.79562664292566275597e+09,'state','STOPPING: 1 rank ended with exit code 0',1);
INSERT INTO "events" VALUES('job-961ba98530',8,1.79562664292566275597e+09,'state','SUCCEEDED: 1 rank ended with exit code 0',1);
INSERT INTO "events" VALUES('job-b31fe932aa',1,1.79562664298913478855e+09,'submitted','1 x 1 ranks',0);
INSERT INTO "events" VALUES('job-b31fe932aa',2,1.79562664300212740898e+09,'placed','placed on node-0000',1);
INSERT INTO "events" VALUES('job-b31fe932aa',3,1.79562664302999091146e+09,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO "events" VALUES('job-b31fe932aa',4,1.79562664302999091146e+09,'rank_started','rank 0 on node node-0000 started',1);
INSERT INTO "events" VALUES('job-b31fe932aa',5,1.79562664302999091146e+09,'state','RUNNING: 1 rank started',1);
INSERT INTO "events" VALUES('job-b31fe932aa',6,1.79562664308644151685e+09,'cancel_requested','cancelled',1);
INSERT INTO "events" VALUES('job-b31fe932aa',7,1.79562664308644151685e+09,'state','STOPPING: cancelled',1);
INSERT INTO "events" VALUES('job-b31fe932aa',8,1.79562664310076308248e+09,'rank_exited','rank 0 on node node-0000 was killed by SIGTERM',1);
INSERT INTO "events" VALUES('job-b31fe932aa',9,1.79562664310076308248e+09,'node_stopped','nothing of the job is left on node node-0000',1);
INSERT INTO "events" VALUES('job-b31fe932aa',10,1.79562664310076308248e+09,'state','CANCELLED: cancelled',1);
INSERT INTO "events" VALUES('job-5997712ac2',1,1.79562664316263842587e+09,'submitted','2 x 2 ranks',0);
INSERT INTO "events" VALUES('job-5997712ac2',2,1.79562664317413043972e+09,'placed','placed on node-0000, node-0001',1);
INSERT INTO "events" VALUES('job-5997712ac2',3,1.79562664319411659239e+09,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO "events" VALUES('job-5997712ac2',4,1.79562664319411659239e+09,'rank_started','ranks 0-1 on node node-0000 started',1);
INSERT INTO "events" VALUES('job-5997712ac2',5,1.79562664319411659239e+09,'engine_ready','the engine of node node-0001 listens on 127.0.0.1:10001',1);
INSERT INTO "events" VALUES('job-5997712ac2',6,1.79562664319411659239e+09,'rank_started','ranks 2-3 on node node-0001 started',1);
INSERT INTO "events" VALUES('job-5997712ac2',7,1.79562664319411659239e+09,'state','RUNNING: all 4 ranks started',1);
INSERT INTO "events" VALUES('job-ebd5fad972',1,1.79562664324700546267e+09,'submitted','9 x 9 ranks',0);
INSERT INTO "events" VALUES('job-ebd5fad972',2,1.79562664325359821323e+09,'waiting','needs 9 nodes with 9 free slots each; connected: node-0000 (2 of 4 free), node-0001 (2 of 4 free)',0);
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
	ranks TEXT NOT NULL, 
	CONSTRAINT pk_job_hosts PRIMARY KEY (job_id, host_index), 
	CONSTRAINT fk_job_hosts_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
INSERT INTO "job_hosts" VALUES('job-961ba98530',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,1,3,'127.0.0.1:10000','',0.0,'','[[3,1000,0,0,"","/var/lib/bagua/node/jobs/job-961ba98530/rank-0.log",1795626642.9146938,1.8217810499991174,false]]');
INSERT INTO "job_hosts" VALUES('job-b31fe932aa',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,1,3,'127.0.0.1:10000','',0.0,'','[[3,1000,-15,15,"","/var/lib/bagua/node/jobs/job-b31fe932aa/rank-0.log",1795626643.1001594,1.9968805869993957,false]]');
INSERT INTO "job_hosts" VALUES('job-5997712ac2',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,2,2,'127.0.0.1:10000','',0.0,'','[[2,1000,0,0,"","/var/lib/bagua/node/jobs/job-5997712ac2/rank-0.log",0.0,0.0,false],[2,1001,0,0,"","/var/lib/bagua/node/jobs/job-5997712ac2/rank-1.log",0.0,0.0,false]]');
INSERT INTO "job_hosts" VALUES('job-5997712ac2',1,'node-0001','node-0001','127.0.0.1','boot-of-node-0001',2,2,2,'127.0.0.1:10001','',0.0,'','[[2,1002,0,0,"","/var/lib/bagua/node/jobs/job-5997712ac2/rank-2.log",0.0,0.0,false],[2,1003,0,0,"","/var/lib/bagua/node/jobs/job-5997712ac2/rank-3.log",0.0,0.0,false]]');
CREATE TABLE job_specs (
	job_id VARCHAR(64) NOT NULL, 
	spec BLOB NOT NULL, 
	CONSTRAINT pk_job_specs PRIMARY KEY (job_id), 
	CONSTRAINT fk_job_specs_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
INSERT INTO "job_specs" VALUES('job-961ba98530',X'0A05656E64656412092F62696E2F7472756520014001480159000000000018F54061000000000000F03F');
INSERT INTO "job_specs" VALUES('job-b31fe932aa',X'0A0963616E63656C6C65641205747261696E200132060A01411201624001480159000000000018F54061000000000000F03F');
INSERT INTO "job_specs" VALUES('job-5997712ac2',X'0A0772756E6E696E671205747261696E20014002480259000000000018F54061000000000000F03F');
INSERT INTO "job_specs" VALUES('job-ebd5fad972',X'0A0777616974696E671205747261696E20014009480959000000000018F54061000000000000F03F');
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
	master_addr VARCHAR(255) NOT NULL, 
	master_port INTEGER NOT NULL, 
	job_key BLOB NOT NULL, 
	last_event INTEGER NOT NULL, 
	revision INTEGER NOT NULL, 
	lease_owner VARCHAR(64), 
	CONSTRAINT pk_jobs PRIMARY KEY (job_id), 
	CONSTRAINT uq_jobs_idempotency_key UNIQUE (idempotency_key)
);
INSERT INTO "jobs" VALUES('job-961ba98530','a key','ended',X'0A05656E64656412092F62696E2F74727565200140014801',5,'1 rank ended with exit code 0',5,NULL,1,1.7956266428799431324e+09,0.0,1.79562664292566275597e+09,1.77606476800065138377e+00,1.80207712800074659753e+00,1.82178104999911738559e+00,'127.0.0.1',27147,X'F968EF02AFEB0CCF77F12FA127AE7B64A2F1FAE99AF68C790A207E3503EAE566',8,4,'coordinator-30390a158f4f47af');
INSERT INTO "jobs" VALUES('job-b31fe932aa',NULL,'cancelled',X'0A0963616E63656C6C65641205747261696E200140014801',7,'cancelled',7,'cancelled',1,1.79562664298913478855e+09,1.79562664302999091146e+09,1.79562664310076308248e+09,1.88525604700043913908e+00,1.89824559199951181653e+00,1.98255933099972025956e+00,'127.0.0.1',22523,X'2FC5BC7015304D17A279222CE901722601E56A6BF69EB8E20350132DC65C0AE2',10,6,'coordinator-30390a158f4f47af');
INSERT INTO "jobs" VALUES('job-5997712ac2',NULL,'running',X'0A0772756E6E696E671205747261696E200140024802',3,'all 4 ranks started',NULL,NULL,1,1.79562664316263842587e+09,1.79562664319411659239e+09,0.0,2.05875973200090811587e+00,2.07024835599986545275e+00,0.0,'127.0.0.1',31464,X'CB9AAF1B0174F868EBC3096839A4DBB17000D17360F8CE9B629F8048FF5EB895',7,4,'coordinator-30390a158f4f47af');
INSERT INTO "jobs" VALUES('job-ebd5fad972',NULL,'waiting',X'0A0777616974696E671205747261696E200140094809',1,'needs 9 nodes with 9 free slots each; connected: node-0000 (2 of 4 free), node-0001 (2 of 4 free)',NULL,NULL,0,1.79562664324700546267e+09,0.0,0.0,2.14312640900061524007e+00,0.0,0.0,'',22413,X'BA15E61BED350BC75E6A3BA313E65346AE393C8304D1E5B080D10B394285D03E',2,2,'coordinator-30390a158f4f47af');
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
INSERT INTO "nodes" VALUES('node-0000','node-0000','127.0.0.1',4,'rig','boot-of-node-0000',1.79562664285962367057e+09,'coordinator-30390a158f4f47af');
INSERT INTO "nodes" VALUES('node-0001','node-0001','127.0.0.1',4,'rig','boot-of-node-0001',1.79562664286513543132e+09,'coordinator-30390a158f4f47af');
CREATE INDEX ix_jobs_finished_at ON jobs (finished_at);
CREATE INDEX ix_jobs_created_at_job_id ON jobs (created_at, job_id);
CREATE INDEX ix_jobs_state_created_at ON jobs (state, created_at);
CREATE INDEX ix_job_hosts_node_id_phase ON job_hosts (node_id, phase);
COMMIT;
