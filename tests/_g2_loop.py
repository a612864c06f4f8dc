import sys, os, time, tempfile, faulthandler
sys.path.insert(0,"/work/main"); os.chdir("/work/main")
from pathlib import Path
def wrapped(root, source):
    import faulthandler, os
    f=open(f"/tmp/g2_hang_{os.environ.get('RANK','x')}_{os.getpid()}.txt","w")
    faulthandler.dump_traceback_later(40, file=f, exit=False)
    from tests.distributed.test_generation_states import start_and_stop_averaging, first_run
    try:
        first_run(root+"/a", source, "auto")
        r=start_and_stop_averaging(root+"/b", source)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0
if __name__=="__main__":
    os.environ["OMP_NUM_THREADS"]="1"
    from tests.support.workers import RankPool
    from tests.support.trained_wan import write_wan_dir
    src=write_wan_dir(Path(tempfile.mkdtemp())/"wan")
    pool=RankPool(2)
    for i in range(int(sys.argv[1])):
        t=time.time()
        try:
            pool.run(wrapped, tempfile.mkdtemp(), str(src), timeout=60)
            print(i, "ok", round(time.time()-t,1), flush=True)
        except BaseException as e:
            print(i, "HANG", str(e)[:300], flush=True); break
    pool.close()
