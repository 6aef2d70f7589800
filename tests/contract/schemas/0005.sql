-- Made by the coordinator of commit 3e534cf: jobs that ended, were cancelled, run, and wait.
BEGIN TRANSACTION;
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);
INSERT INTO "alembic_version" VALUES('0005');
CREATE TABLE coordinators (
	owner VARCHAR(64) NOT NULL, 
	clock FLOAT NOT NULL, 
	CONSTRAINT pk_coordinators PRIMARY KEY (owner)
);
INSERT INTO "coordinators" VALUES('coordinator-babfa8d1db762636',2.48782093099907797295e+00);
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
INSERT INTO "events" VALUES('job-f2ed1c0b1c',1,1.7956271271889822483e+09,'submitted','1 x 1 ranks',0);
INSERT INTO "events" VALUES('job-f2ed1c0b1c',2,1.79562712721600604062e+09,'placed','placed on node-0000',1);
INSERT INTO "events" VALUES('job-f2ed1c0b1c',3,1.79562712727713251112e+09,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO "events" VALUES('job-f2ed1c0b1c',4,1.79562712727713251112e+09,'rank_started','rank 0 on node node-0000 started',1);
INSERT INTO "events" VALUES('job-f2ed1c0b1c',5,1.79562712727713251112e+09,'rank_exited','rank 0 on node node-0000 exited with code 0',1);
INSERT INTO "events" VALUES('job-f2ed1c0b1c',6,1.79562712727713251112e+09,'node_stopped','nothing of the job is left on node node-0000',1);
INSERT INTO "events" VALUES('job-f2ed1c0b1c',7,1.79562712727713251112e+09,'state','STOPPING: 1 rank ended with exit code 0',1);
INSERT INTO "events" VALUES('job-f2ed1c0b1c',8,1.79562712727713251112e+09,'state','SUCCEEDED: 1 rank ended with exit code 0',1);
INSERT INTO "events" VALUES('job-be8eb12df0',1,1.79562712734659934042e+09,'submitted','1 x 1 ranks',0);
INSERT INTO "events" VALUES('job-be8eb12df0',2,1.7956271273879146576e+09,'placed','placed on node-0000',1);
INSERT INTO "events" VALUES('job-be8eb12df0',3,1.79562712743842267985e+09,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO "events" VALUES('job-be8eb12df0',4,1.79562712743842267985e+09,'rank_started','rank 0 on node node-0000 started',1);
INSERT INTO "events" VALUES('job-be8eb12df0',5,1.79562712743842267985e+09,'state','RUNNING: 1 rank started',1);
INSERT INTO "events" VALUES('job-be8eb12df0',6,1.79562712751461291309e+09,'cancel_requested','cancelled',1);
INSERT INTO "events" VALUES('job-be8eb12df0',7,1.79562712751461291309e+09,'state','STOPPING: cancelled',1);
INSERT INTO "events" VALUES('job-be8eb12df0',8,1.79562712753712081913e+09,'rank_exited','rank 0 on node node-0000 was killed by SIGTERM',1);
INSERT INTO "events" VALUES('job-be8eb12df0',9,1.79562712753712081913e+09,'node_stopped','nothing of the job is left on node node-0000',1);
INSERT INTO "events" VALUES('job-be8eb12df0',10,1.79562712753712081913e+09,'state','CANCELLED: cancelled',1);
INSERT INTO "events" VALUES('job-57ad1780de',1,1.79562712759435629842e+09,'submitted','2 x 2 ranks',0);
INSERT INTO "events" VALUES('job-57ad1780de',2,1.79562712761908268924e+09,'placed','placed on node-0000, node-0001',1);
INSERT INTO "events" VALUES('job-57ad1780de',3,1.79562712765644717219e+09,'engine_ready','the engine of node node-0000 listens on 127.0.0.1:10000',1);
INSERT INTO "events" VALUES('job-57ad1780de',4,1.79562712765644717219e+09,'rank_started','ranks 0-1 on node node-0000 started',1);
INSERT INTO "events" VALUES('job-57ad1780de',5,1.79562712765644717219e+09,'engine_ready','the engine of node node-0001 listens on 127.0.0.1:10001',1);
INSERT INTO "events" VALUES('job-57ad1780de',6,1.79562712765644717219e+09,'rank_started','ranks 2-3 on node node-0001 started',1);
INSERT INTO "events" VALUES('job-57ad1780de',7,1.79562712765644717219e+09,'state','RUNNING: all 4 ranks started',1);
INSERT INTO "events" VALUES('job-c7225e49fa',1,1795627127.69631,'submitted','9 x 9 ranks',0);
INSERT INTO "events" VALUES('job-c7225e49fa',2,1.79562712772599720957e+09,'waiting','needs 9 nodes with 9 free slots each; connected: node-0000 (2 of 4 free), node-0001 (2 of 4 free)',0);
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
INSERT INTO "job_hosts" VALUES('job-f2ed1c0b1c',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,1,3,'127.0.0.1:10000','',0.0,'','',0.0,'',0,0,1,0,0,0,0.0,'[[3,1000,0,0,"","/var/lib/bagua/node/jobs/job-f2ed1c0b1c/rank-0.log",1795627127.259271,2.0388253630007966,false,-1,false,false,false]]');
INSERT INTO "job_hosts" VALUES('job-be8eb12df0',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,1,3,'127.0.0.1:10000','',0.0,'','',0.0,'',0,0,1,0,0,0,0.0,'[[3,1000,-15,15,"","/var/lib/bagua/node/jobs/job-be8eb12df0/rank-0.log",1795627127.524797,2.2988138500004425,false,-1,false,false,false]]');
INSERT INTO "job_hosts" VALUES('job-57ad1780de',0,'node-0000','node-0000','127.0.0.1','boot-of-node-0000',0,2,2,'127.0.0.1:10000','',0.0,'','',0.0,'',0,0,1,0,0,0,0.0,'[[2,1000,0,0,"","/var/lib/bagua/node/jobs/job-57ad1780de/rank-0.log",0.0,0.0,false,-1,false,false,false],[2,1001,0,0,"","/var/lib/bagua/node/jobs/job-57ad1780de/rank-1.log",0.0,0.0,false,-1,false,false,false]]');
INSERT INTO "job_hosts" VALUES('job-57ad1780de',1,'node-0001','node-0001','127.0.0.1','boot-of-node-0001',2,2,2,'127.0.0.1:10001','',0.0,'','',0.0,'',0,0,1,0,0,0,0.0,'[[2,1002,0,0,"","/var/lib/bagua/node/jobs/job-57ad1780de/rank-2.log",0.0,0.0,false,-1,false,false,false],[2,1003,0,0,"","/var/lib/bagua/node/jobs/job-57ad1780de/rank-3.log",0.0,0.0,false,-1,false,false,false]]');
CREATE TABLE job_specs (
	job_id VARCHAR(64) NOT NULL, 
	spec BLOB NOT NULL, 
	CONSTRAINT pk_job_specs PRIMARY KEY (job_id), 
	CONSTRAINT fk_job_specs_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
INSERT INTO "job_specs" VALUES('job-f2ed1c0b1c',X'0A05656E64656412092F62696E2F7472756520014001480159000000000018F54061000000000000F03F');
INSERT INTO "job_specs" VALUES('job-be8eb12df0',X'0A0963616E63656C6C65641205747261696E200132060A01411201624001480159000000000018F54061000000000000F03F');
INSERT INTO "job_specs" VALUES('job-57ad1780de',X'0A0772756E6E696E671205747261696E20014002480259000000000018F54061000000000000F03F');
INSERT INTO "job_specs" VALUES('job-c7225e49fa',X'0A0777616974696E671205747261696E20014009480959000000000018F54061000000000000F03F');
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
INSERT INTO "jobs" VALUES('job-f2ed1c0b1c','a key','ended',X'0A05656E64656412092F62696E2F74727565200140014801',5,'1 rank ended with exit code 0',5,NULL,1,1.7956271271889822483e+09,0.0,1.79562712727713251112e+09,1.9506782999997085426e+00,1.97769952900125645101e+00,2.03882536300079664215e+00,0,0,0,0,1,0,0.0,'','127.0.0.1',26705,X'CA1B20092AFD61AAAC2248302DB0C13330CDB42906431D7909CABCDC3047061D',8,4,'coordinator-babfa8d1db762636');
INSERT INTO "jobs" VALUES('job-be8eb12df0',NULL,'cancelled',X'0A0963616E63656C6C65641205747261696E200140014801',7,'cancelled',7,'cancelled',1,1.79562712734659934042e+09,1.79562712743842267985e+09,1.79562712753712081913e+09,2.10829599300086556468e+00,2.14960846800022409297e+00,2.27630638300070131663e+00,0,0,0,0,1,0,0.0,'','127.0.0.1',24419,X'A1A24C53DBFEA67E7932DDE5FEBD4B7316BD310EA70A8EFC5D33F50C29CA1C03',10,6,'coordinator-babfa8d1db762636');
INSERT INTO "jobs" VALUES('job-57ad1780de',NULL,'running',X'0A0772756E6E696E671205747261696E200140024802',3,'all 4 ranks started',NULL,NULL,1,1.79562712759435629842e+09,1.79562712765644717219e+09,0.0,2.35605325700089451856e+00,2.38077635400077269878e+00,0.0,0,0,0,0,4,0,0.0,'','127.0.0.1',28959,X'6427B9D11259E3010B368D5060A90E6B95EC7A90DB3B40661F6299E25130073F',7,4,'coordinator-babfa8d1db762636');
INSERT INTO "jobs" VALUES('job-c7225e49fa',NULL,'waiting',X'0A0777616974696E671205747261696E200140094809',1,'needs 9 nodes with 9 free slots each; connected: node-0000 (2 of 4 free), node-0001 (2 of 4 free)',NULL,NULL,0,1795627127.69631,0.0,0.0,2.45803638799952750559e+00,0.0,0.0,0,0,0,0,0,0,0.0,'','',22324,X'242F871B486BFAF30E4E44E75056D357A9C5DCD0E6D4F0247492ABDC40A09AAE',2,2,'coordinator-babfa8d1db762636');
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
INSERT INTO "nodes" VALUES('node-0000','node-0000','127.0.0.1',4,'rig','boot-of-node-0000',1.79562712716366648679e+09,'coordinator-babfa8d1db762636',0,0);
INSERT INTO "nodes" VALUES('node-0001','node-0001','127.0.0.1',4,'rig','boot-of-node-0001',1.79562712716366648679e+09,'coordinator-babfa8d1db762636',0,0);
CREATE INDEX ix_jobs_state_created_at ON jobs (state, created_at);
CREATE INDEX ix_jobs_finished_at ON jobs (finished_at);
CREATE INDEX ix_jobs_created_at_job_id ON jobs (created_at, job_id);
CREATE INDEX ix_job_hosts_node_id_phase ON job_hosts (node_id, phase);
COMMIT;
