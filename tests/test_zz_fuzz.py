import random,collections
from pathlib import Path
from mini_sglang.weights.hub import ModelSource
from mini_sglang.weights.model_config import load_model_config
from mini_sglang.weights.load import load_weights
from mini_sglang.weights.tensor import WeightSlot
from mini_sglang.tokenizer import load_tokenizer
def test_f(write_gguf,write_checkpoint):
  for c in (write_gguf("llama",kind="Q8_0"),):
    data=bytearray(c.path.read_bytes()); r=random.Random(0); seen=collections.Counter()
    for i in range(1500):
        d=bytearray(data)
        for _ in range(r.choice([1,3])): 
            d[r.randrange(0,8000)]=r.choice([0,255,r.randrange(256)])
        c.path.write_bytes(d)
        for f in ('cfg','tok','w'):
            try:
                if f=='cfg': cfg=load_model_config(c.source)
                if f=='tok': load_tokenizer(c.source)
                if f=='w':
                    slots={n:WeightSlot(tuple(p.shape),lambda t:t.dense()) for n,p in c.model.named_parameters()}
                    load_weights(c.source,cfg,slots,show_progress=False)
            except ValueError as e: pass
            except Exception as e:
                seen[(f,type(e).__name__,str(e)[:60])]+=1
    print(seen)
