import sys, time, traceback, collections
sys.path.insert(0, "tests/simulation")
import structlog, logging
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
from simulated.history import play, drawn
a,b=int(sys.argv[1]),int(sys.argv[2])
t=time.process_time(); bad=collections.Counter(); ex={}
import faulthandler, os, gc
gc.disable()
from simulated import database
if os.environ.get("NOLOSE"): database.KINDS=("fail","slow","cancel")
for seed in range(a,b):
    faulthandler.dump_traceback_later(20, exit=True)
    if seed%100==0: gc.collect(); cur=seed; open('/tmp/w/sim-tmp/seed%d'%a,'w').write(str(seed))
    try: play(drawn(seed))
    except Exception as e:
        k=type(e).__name__+": "+str(e)[:110]; bad[k]+=1; ex.setdefault(k,[]).append(seed)
        if len(sys.argv)>3: traceback.print_exc()
d=time.process_time()-t
print(f"{(b-a)} in {d:.2f} s, {d/(b-a)*1e3:.2f} ms each; bad {sum(bad.values())}")
for k,n in bad.most_common(12): print(n,k,ex[k][:5])
