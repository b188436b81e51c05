// FP8 sparse MLA prefill on Hopper, 64 heads a CTA. Compile with -D D_QK=512 or 576 and
// -D ROW_SCALES=0 or 1; `backends/sm90.py` launches it.
//
//   for a query token t and 64 of its heads:
//     S[h, j]  = sum_d Q[h, d] K[j, d]                 K[j] = kv[indices[t, j]], zeros where the slot is invalid
//     P[h, j]  = 2^(c S[h, j] - ref[h])                c = sm_scale q_scale kv_scale log2(e)
//     O[h, d]  = sum_j P[h, j] V[j, d] / sum_j P[h, j] V = the first 512 columns of K
//
// Why this shape of kernel. FP8 wgmma wants both operands K-major, and V is not: its transposed copy would have to be
// written to shared memory, whose bandwidth is what such a kernel runs out of first. Here V^T is the A operand of
// O^T = V^T P^T and comes from registers: ldmatrix.trans reads it transposed in 16-bit units and two byte permutations a
// register finish the job. Q is an A operand in registers too, loaded once a query token. So the tensor cores read
// from shared memory only K (in S = Q K^T) and P (in O^T = V^T P^T), half of what a shared-memory A would cost.
//
// Four warpgroups, one job each; a block is 64 slots:
//
//   producer    gathers K[b+2], K[b+3], ...  by 16-byte cp.async into a ring of stages, and says which slots are valid
//   scores      S[b+1] = Q K[b+1]^T    |  softmax of S[b+1]: P[b+1], and factors for O, whose reference may have moved
//   values 0,1  O^T = O^T factor + V[b]^T P[b]^T, columns 0-255 and 256-511
//
// The three work on different blocks at a time, and nothing goes back from the values to the scores but free buffers: so
// the scores are in the next query token while the values still write the last one out.
#pragma once

#include "common/problem.cuh"
#include "common/wgmma.cuh"

constexpr bool kRowScales = ROW_SCALES;  // q_scale a token, or a token and head; else one for all
constexpr int kHeads = HEADS;     // heads a CTA: M of S = Q K^T, N of O^T = V^T P^T
constexpr int kBlock = 64;        // slots a block: N of S = Q K^T
constexpr int kStages = 5;        // blocks of K in shared memory
constexpr int kLag = 1;           // blocks of copies in flight before the oldest must have landed
constexpr int kLatentTile = 8192;  // 64 rows x 128 columns, 128-byte swizzle
constexpr int kLatentTiles = kDv / 128;
constexpr int kRopeTile = D_QK > kDv ? 4096 : 0;  // 64 rows x 64 columns, 64-byte swizzle
constexpr int kStageBytes = kLatentTiles * kLatentTile + kRopeTile;
constexpr int kRope = kLatentTiles * kLatentTile;  // offset of the rope tile in a stage
constexpr int kQBytes = kHeads * D_QK;
constexpr int kPBytes = kHeads * kBlock;
constexpr int kQSteps = D_QK / 32;  // k-steps of S = Q K^T

constexpr int kThreads = 512;
constexpr u32 kProducerRegisters = 24, kScoreRegisters = 136, kValueRegisters = 176;  // 128 x sum = 65,536

// Shared memory, by byte offset. Tiles want 1024-byte alignment (the swizzles repeat within it).
constexpr u32 kAtK = 0;                                   // [kStages][kStageBytes]
constexpr u32 kAtQ = kAtK + kStages * kStageBytes;        // [kQBytes]
constexpr u32 kAtP = kAtQ + kQBytes;                      // [2][kPBytes]: 8 heads x 16 slots core matrices
constexpr u32 kAtFactor = kAtP + 2 * kPBytes;             // float [2][kHeads]: O is multiplied by it before P[b] is added
constexpr u32 kAtWeight = kAtFactor + 2 * kHeads * 4;     // float [4][kHeads]: kv_scale / sum of an item. 4: it may be
                                                          // read while the scores are two items further
constexpr u32 kAtValid = kAtWeight + 4 * kHeads * 4;      // u64 [kStages], bit r: slot r of the block is valid
constexpr u32 kAtKFull = kAtValid + kStages * 8;          // mbarriers from here
constexpr u32 kAtKEmpty = kAtKFull + kStages * 8;
constexpr u32 kAtPFull = kAtKEmpty + kStages * 8;
constexpr u32 kAtPEmpty = kAtPFull + 2 * 8;
constexpr u32 kAtQFull = kAtPEmpty + 2 * 8;
constexpr u32 kAtQEmpty = kAtQFull + 8;
constexpr u32 kSharedBytes = kAtQEmpty + 8;
static_assert(kSharedBytes <= 232448, "more than a CTA of compute capability 9.0 can have");

// Shared memory by address. The base stays in a register; a generic pointer would be converted at each use.
struct Memory {
  u32 base;
  DEVICE u32 k(u32 slot) const { return base + kAtK + slot * kStageBytes; }
  DEVICE u32 q() const { return base + kAtQ; }
  DEVICE u32 p(u32 slot) const { return base + kAtP + slot * kPBytes; }
  DEVICE u32 factor(u32 slot, u32 head) const { return base + kAtFactor + slot * (kHeads * 4) + head * 4; }
  DEVICE u32 weight(u32 item, u32 head) const { return base + kAtWeight + item * (kHeads * 4) + head * 4; }
  DEVICE u32 valid(u32 slot) const { return base + kAtValid + slot * 8; }
  DEVICE u32 k_full(u32 slot) const { return base + kAtKFull + slot * 8; }
  DEVICE u32 k_empty(u32 slot) const { return base + kAtKEmpty + slot * 8; }
  DEVICE u32 p_full(u32 slot) const { return base + kAtPFull + slot * 8; }
  DEVICE u32 p_empty(u32 slot) const { return base + kAtPEmpty + slot * 8; }
  DEVICE u32 q_full() const { return base + kAtQFull; }
  DEVICE u32 q_empty() const { return base + kAtQEmpty; }
};

// An empty row still takes one (fully masked) block, so that every role sees every item.
DEVICE int blocks_of(int length) { return max(1, (length + kBlock - 1) / kBlock); }

// Where 16-byte chunk `chunk` of row `row` of Q lies: conflict-free for ldmatrix at either row pitch.
DEVICE u32 q_offset(u32 row, u32 chunk) {
  const u32 turn = D_QK % 128 == 0 ? row & 7 : (row >> 1) & 3;
  return row * D_QK + ((chunk ^ turn) << 4);
}

// ---- producer --------------------------------------------------------------------------------------------------
//
// Warp w gathers rows 16 w .. 16 w + 15 of each block. Eight lanes copy 128 contiguous bytes, a warp four rows; the rope
// part is 64 bytes of eight rows an instruction. Every second row of 576 bytes starts in the middle of a 128-byte line,
// and its pieces touch two lines each: reading such rows as 64 + 4 x 128 bytes makes the gather alone 1.5 times
// faster, but its instructions cost the other warps more than it gives.

struct Producer {
  const PrefillParams& params;
  const Memory memory;
  const u32 lane, warp;
  Ring<kStages> stage, announced;

  DEVICE int load_index(const int* row, int length, int block) const {
    const int slot = block * kBlock + warp * 16 + (lane & 15);
    return slot < length ? __ldg(row + slot) : -1;
  }

  // Q of an item, zeros for heads past h_q; its copies are announced by themselves.
  DEVICE void load_q(int token, int group, u32 parity) const {
    mbarrier_wait(memory.q_empty(), parity ^ 1);
    const u8* source = params.q + token * params.q_stride_token;
#pragma unroll 2
    for (u32 c = warp * 32 + lane; c < kQBytes / 16; c += 128) {
      const u32 row = c / (D_QK / 16), chunk = c % (D_QK / 16), head = group * kHeads + row;
      const bool exists = head < static_cast<u32>(params.h_q);
      cp_async_16(memory.q() + q_offset(row, chunk), source + (exists ? head : 0) * params.q_stride_head + chunk * 16,
                  exists ? 16 : 0);
    }
    cp_async_arrive(memory.q_full());
  }

  // Issues the copies of one block; `announce` tells the scores when they have landed.
  DEVICE void gather(int index) {
    const u32 slot = stage.slot;
    mbarrier_wait(memory.k_empty(slot), stage.parity ^ 1);
    const bool index_valid = static_cast<u32>(index) < static_cast<u32>(params.s_kv);
    const u32 valid = __ballot_sync(~0u, index_valid);
    if (lane == 0) store_shared_u16(memory.valid(slot) + warp * 2, valid);
    if (!index_valid) index = -1;
    const u32 kv_stride = static_cast<u32>(params.kv_stride);
    {
      // Opaque, here and below: kept from block to block, what follows from it would not fit in registers.
      const u32 row = opaque(lane) >> 3, eighth = opaque(lane) & 7;
      const u32 latent = memory.k(slot) + warp * 2048 + row * 128 + ((eighth ^ row) << 4);
#pragma unroll
      for (u32 pass = 0; pass < 4; pass++) {
        const int i = __shfl_sync(~0u, index, 4 * pass + row);
        const u8* source = params.kv + static_cast<u64>(static_cast<u32>(max(i, 0))) * kv_stride + eighth * 16;
        const u32 line = (latent ^ (pass & 1) << 6) + pass * 512;  // the swizzle of row + 4 pass
#pragma unroll
        for (u32 tile = 0; tile < kLatentTiles; tile++) {
          cp_async_16(line + tile * kLatentTile, source + tile * 128, i >= 0 ? 16 : 0);
        }
      }
    }
    if constexpr (D_QK > kDv) {
      const u32 row = opaque(lane) >> 2, quarter = opaque(lane) & 3;
      const u32 rope = memory.k(slot) + kRope + warp * 1024 + row * 64 + ((quarter ^ row >> 1 & 3) << 4);
#pragma unroll
      for (u32 pass = 0; pass < 2; pass++) {
        const int i = __shfl_sync(~0u, index, 8 * pass + row);
        const u8* source = params.kv + static_cast<u64>(static_cast<u32>(max(i, 0))) * kv_stride + kDv + quarter * 16;
        cp_async_16(rope + pass * 512, source, i >= 0 ? 16 : 0);
      }
    }
    cp_async_commit();
    stage.next();
  }

  // Blocks become full `kLag` blocks after their copies were issued: the wait, and the fence that wgmma needs after
  // copies of the generic proxy, are here and not in the scores.
  template <int lag>
  DEVICE void announce() {
    cp_async_wait<lag>();
    fence_async_shared();
    mbarrier_arrive(memory.k_full(announced.slot));
    announced.next();
  }

  DEVICE void flush(int& issued) {
    for (; issued > 0; issued--) announce<0>();
  }

  DEVICE void run(int items, int groups) {
    int item = blockIdx.x;
    if (item >= items) return;
    int length = length_of(params, item / groups);
    const int* row = params.indices + item / groups * params.indices_stride;
    int index = load_index(row, length, 0);
    load_q(item / groups, item % groups, 0);
    u32 q_parity = 1;
    int issued = 0;
    while (true) {
      const bool more = item + static_cast<int>(gridDim.x) < items;
      const int next_length = more ? length_of(params, (item + gridDim.x) / groups) : 0;
      for (int block = 0; block < blocks_of(length); block++) {
        const bool last = block + 1 == blocks_of(length);
        int ahead = -1;  // the index of the next block is on its way while this one's rows are asked for
        if (!last) {
          ahead = load_index(row, length, block + 1);
        } else if (more) {
          row = params.indices + (item + gridDim.x) / groups * params.indices_stride;
          ahead = load_index(row, next_length, 0);
        }
        gather(index);
        if (issued < kLag) issued++; else announce<kLag>();
        index = ahead;
        // The next item's Q goes in once the scores have this item's in registers. That is certain when they have
        // given back its first stage; in a shorter item they may still need the blocks not yet announced.
        if (more && (last ? block <= kStages : block == kStages)) {
          if (block < kStages) flush(issued);
          load_q((item + gridDim.x) / groups, (item + gridDim.x) % groups, q_parity);
        }
      }
      if (!more) break;
      item += gridDim.x;
      length = next_length;
      q_parity ^= 1;
    }
    flush(issued);
  }
};

// ---- scores ----------------------------------------------------------------------------------------------------
//
// Lane 4 g + i of warp w owns rows (heads) 16 w + g and 16 w + g + 8, slots 8 j + 2 i and + 1 of each block: a row's
// maximum runs over the four lanes of a quad in every block, its sum only at the end of an item.

struct Scores {
  const PrefillParams& params;
  const Memory memory;
  const u32 lane, warp;
  Ring<kStages> stage;
  Ring<2> p_slot;
  u32 q[kQSteps][4];
  float s[32];
  float reference[2], sum[2];  // of this lane's two heads, as is all that follows
  float c_row[2];  // c of this lane's two heads, in the variant with row scales
  float c_all;     // c of all heads, in the other

  DEVICE float c(u32 r) const { return kRowScales ? c_row[r] : c_all; }

  // A scale that is not finite and positive shows in the weights in the end, not in the exponents.
  DEVICE float to_c(float q_scale, float kv_scale) const {
    return is_scale(q_scale) && is_scale(kv_scale) ? params.sm_scale * q_scale * kv_scale * kLog2e : kBad;
  }

  // Into the registers of c, to become c after the first QK: by then they are there, and no register more is taken.
  DEVICE void load_row_scales(int token, int group) {
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      const u32 head = min(group * kHeads + warp * 16 + (lane >> 2) + 8 * r, params.h_q - 1);
      c_row[r] = __ldg(params.q_scale + static_cast<i64>(token) * params.q_scale_stride_token +
                       head * params.q_scale_stride_head);
    }
  }

  DEVICE void load_q(u32 parity) {
    mbarrier_wait(memory.q_full(), parity);
    // Opaque: the two addresses below, kept from item to item, would not fit in registers.
    const u32 row = opaque(warp * 16 + (lane & 15)), half = lane >> 4;
    const u32 base = memory.q();
#pragma unroll
    for (u32 step = 0; step < kQSteps; step++) ldmatrix_x4(q[step], base + q_offset(row, 2 * step + half));
    mbarrier_arrive(memory.q_empty());
  }

  // S = Q K[stage]^T, left in flight
  DEVICE void start_multiply(bool ready) {
    if (!ready) mbarrier_wait(memory.k_full(stage.slot), stage.parity);
    const u32 tile = memory.k(stage.slot);
    const u64 latent = descriptor(descriptor_shape(16, 1024, Swizzle::bytes_128), tile);
    const u64 rope = descriptor(descriptor_shape(16, 512, Swizzle::bytes_64), tile + kRope);
    wgmma_fence();
#pragma unroll
    for (u32 step = 0; step < kQSteps; step++) {
      const u64 k = step < 16 ? latent + (step / 4 * kLatentTile + step % 4 * 32 >> 4) : rope + (step - 16) * 2;
      wgmma_m64n64k32(s, q[step], k, step > 0);
    }
    wgmma_commit();
  }

  DEVICE void mask(u64 valid) {
    if (__builtin_expect(valid == ~0ull, 1)) return;
    valid >>= 2 * (lane & 3);
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
      const u32 bits = static_cast<u32>(valid >> 8 * j);
      if (!(bits & 1)) s[4 * j] = s[4 * j + 2] = -kInfinity;
      if (!(bits & 2)) s[4 * j + 1] = s[4 * j + 3] = -kInfinity;
    }
  }

  DEVICE static float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
  }

  // Moves the references to the new maxima; `factor` is what O and the sums are multiplied by.
  DEVICE void move_references(float (&factor)[2]) {
    float top[2][4];
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
#pragma unroll
      for (u32 r = 0; r < 2; r++) {
        const float* x = s + 4 * j + 2 * r;
        top[r][j] = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[16], x[17]));
      }
    }
    float row_top[2];
#pragma unroll
    for (u32 r = 0; r < 2; r++) row_top[r] = fmaxf(fmaxf(top[r][0], top[r][1]), fmaxf(top[r][2], top[r][3]));
#pragma unroll
    for (u32 lanes = 1; lanes <= 2; lanes *= 2) {
      const float other[2] = {__shfl_xor_sync(~0u, row_top[0], lanes), __shfl_xor_sync(~0u, row_top[1], lanes)};
#pragma unroll
      for (u32 r = 0; r < 2; r++) row_top[r] = fmaxf(row_top[r], other[r]);
    }
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      const float moved = fmaxf(reference[r], fmaf(row_top[r], c(r), -kHeadroom));
      factor[r] = exp2_approx(reference[r] - moved);
      reference[r] = moved;
      sum[r] *= factor[r];
    }
  }

  // P = 2^(c S - ref), to e4m3 and to shared memory: two 8-column groups of S make one 16-slot row of P.
  DEVICE void write_p() {
    const u32 row = 2 * warp + (lane >> 3 & 1);
    const u32 base = memory.p(p_slot.slot) + (lane >> 4) * 1024 + row * 128 + (lane & 7) * 16;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      u32 packed[4];
#pragma unroll
      for (u32 pair = 0; pair < 2; pair++) {
        float* x = s + 16 * half + 8 * pair;
#pragma unroll
        for (u32 e = 0; e < 8; e++) x[e] = exp2_approx(fmaf(x[e], c(e / 2 & 1), -reference[e / 2 & 1]));
        sum[0] += (x[0] + x[1]) + (x[4] + x[5]);
        sum[1] += (x[2] + x[3]) + (x[6] + x[7]);
        packed[2 * pair] = pack_e4m3(x[0], x[1], x[4], x[5]);
        packed[2 * pair + 1] = pack_e4m3(x[2], x[3], x[6], x[7]);
      }
      stmatrix_x4(base + half * 2048, packed);
    }
  }

  // Row sums to 1 / sum for the values, and this item's max_logits and lse. The sum is 0 only where no slot is valid: the
  // largest logit alone has given it 256.
  DEVICE void finish(int token, int group, float kv_scale, u32 ring) {
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      const float total = quad_sum(sum[r]);
      const bool empty = total == 0.f;
      const float v_scale = c(r) == kBad ? kNan : kv_scale;
      const u32 row = warp * 16 + (lane >> 2) + 8 * r, head = group * kHeads + row;
      if ((lane & 3) == 0 && head < static_cast<u32>(params.h_q)) {
        float denominator = total;
        if (params.attn_sink != nullptr) {
          denominator += exp2_approx(__ldg(params.attn_sink + head) * kLog2e - reference[r]);
        }
        store_shared_float(memory.weight(ring, row), empty ? 0.f : v_scale / denominator);
        // A NaN logit is lost in fmaxf but not in the sum; v_scale carries a bad scale.
        const float poison = (total + v_scale) * 0.f;
        const i64 at = static_cast<i64>(token) * params.out_heads + head;
        params.max_logits[at] = empty ? -kInfinity : (reference[r] + kHeadroom) * kLn2 + poison;
        params.lse[at] = empty ? kInfinity : (reference[r] + log2_approx(total)) * kLn2 + poison;
      }
    }
  }

  DEVICE void run(int items, int groups) {
    const float kv_scale = __ldg(params.kv_scale);
    if constexpr (!kRowScales) c_all = to_c(__ldg(params.q_scale), kv_scale);
    u32 turn = 0;  // items done
    bool ready = false;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const int blocks = blocks_of(length_of(params, item / groups));
      load_q(turn & 1);
      if constexpr (kRowScales) load_row_scales(item / groups, item % groups);
#pragma unroll
      for (u32 r = 0; r < 2; r++) {
        reference[r] = kLowest;
        sum[r] = 0.f;
      }
      for (int block = 0; block < blocks; block++) {
        start_multiply(ready);
        // Under QK: P's buffer may be overwritten only after both value warpgroups have added the P[b-2] V[b-2] of it.
        mbarrier_wait(memory.p_empty(p_slot.slot), p_slot.parity ^ 1);
        const u64 valid = load_shared_u64(memory.valid(stage.slot));
        wgmma_wait<0>();
        if (kRowScales && block == 0) {
#pragma unroll
          for (u32 r = 0; r < 2; r++) c_row[r] = to_c(c_row[r], kv_scale);
        }
        mask(valid);
        float factor[2];
        move_references(factor);
        stage.next();
        // Asked for here, its answer comes under the exponentials.
        ready = mbarrier_test(memory.k_full(stage.slot), stage.parity);
        write_p();
        if ((lane & 3) == 0) {
          store_shared_float(memory.factor(p_slot.slot, warp * 16 + (lane >> 2)), factor[0]);
          store_shared_float(memory.factor(p_slot.slot, warp * 16 + (lane >> 2) + 8), factor[1]);
        }
        if (block + 1 == blocks) finish(item / groups, item % groups, kv_scale, turn & 3);
        fence_async_shared();  // P was stored by stmatrix and is read by wgmma
        mbarrier_arrive(memory.p_full(p_slot.slot));
        p_slot.next();
      }
      turn++;
    }
  }
};

// ---- values ----------------------------------------------------------------------------------------------------
//
// Value warpgroup v owns columns 256 v .. 256 v + 255 of O as O^T: four m64 tiles of 64 columns, and in each the warp
// w's 16 columns are one 16-byte chunk of a V row. ldmatrix.trans gives lane 4 g + i the byte pairs (columns 2 g and
// 2 g + 1) of four slots; two byte permutations part the columns. So row g of the A operand is column 2 g, row g + 8
// is column 2 g + 1, and in the end a lane holds column pairs, ready to be stored as bfloat16x2.

struct Values {
  const PrefillParams& params;
  const Memory memory;
  const u32 lane, warp, half;
  Ring<kStages> stage;
  Ring<2> p_slot;
  float o[4][32];

  // V^T of slots 32 step .. + 31 in m64 tile m, columns still in pairs
  DEVICE void load_v(u32 (&v)[4], u32 step, u32 m) const {
    const u32 base = memory.k(stage.slot) + half * 2 * kLatentTile + lane * 128 + ((warp ^ (lane & 7)) << 4);
    ldmatrix_x4_trans(v, (base ^ ((m & 1) << 6)) + (m >> 1) * kLatentTile + step * 4096);
  }

  // Parts the columns: the A operand of wgmma
  DEVICE static void part_columns(u32 (&v)[4]) {
    const u32 r[4] = {v[0], v[1], v[2], v[3]};
    v[0] = select_bytes(r[0], r[1], 0x6420);
    v[1] = select_bytes(r[0], r[1], 0x7531);
    v[2] = select_bytes(r[2], r[3], 0x6420);
    v[3] = select_bytes(r[2], r[3], 0x7531);
  }

  // O^T = O^T factor + V[stage]^T P^T, 64 columns and 32 heads at a time.
  //
  // The product of a block is accumulated by itself and added to O in float32. FP8 wgmma keeps some 14 bits of whatever
  // it sums, the accumulator included: beside an O of 256 a product of 0.23 would lose a tenth, and a long flat tail of
  // such products its mass. The addition multiplies O by its factor at no further cost.
  DEVICE void multiply() {
    mbarrier_wait(memory.k_full(stage.slot), stage.parity);  // V is the K tile: its fragments are read before P is there
    u32 v[2][4];
    load_v(v[0], 0, 0);
    load_v(v[1], 1, 0);
    mbarrier_wait(memory.p_full(p_slot.slot), p_slot.parity);
    const u64 p = descriptor(descriptor_shape(1024, 128, Swizzle::none), memory.p(p_slot.slot));
    const u32 factors = memory.factor(p_slot.slot, 2 * (lane & 3));
#pragma unroll
    for (u32 m = 0; m < 4; m++) {
      part_columns(v[0]);
      part_columns(v[1]);
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        float t[16];  // rT = rV @ sP[b], one half of the heads
        wgmma_fence();
        wgmma_m64n32k32(t, v[0], p + h * (512 >> 4), 0);
        wgmma_m64n32k32(t, v[1], p + (2048 + h * 512 >> 4), 1);
        wgmma_commit();
        float2 factor[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) factor[j] = load_shared_float2(factors + (4 * h + j) * 32);
        wgmma_wait<0>();
        if (h == 1 && m < 3) {
          load_v(v[0], 0, m + 1);
          load_v(v[1], 1, m + 1);
          if (m == 2) mbarrier_arrive(memory.k_empty(stage.slot));
        }
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
          float* x = o[m] + 16 * h + 4 * j;
          x[0] = fmaf(x[0], factor[j].x, t[4 * j]);
          x[1] = fmaf(x[1], factor[j].y, t[4 * j + 1]);
          x[2] = fmaf(x[2], factor[j].x, t[4 * j + 2]);
          x[3] = fmaf(x[3], factor[j].y, t[4 * j + 3]);
        }
      }
    }
  }

  DEVICE void store(int token, int group, u32 ring) {
    u32* out = params.out + (static_cast<i64>(token) * params.out_heads + group * kHeads) * (kDv / 2) + half * 128 +
               warp * 8 + (lane >> 2);
    const u32 heads = params.h_q - group * kHeads;
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
      const u32 head = 8 * j + 2 * (lane & 3);
      const float2 f = load_shared_float2(memory.weight(ring, head));
#pragma unroll
      for (u32 m = 0; m < 4; m++) {
        if (head < heads) out[head * (kDv / 2) + m * 32] = pack_bf16(o[m][4 * j] * f.x, o[m][4 * j + 2] * f.x);
        if (head + 1 < heads) {
          out[(head + 1) * (kDv / 2) + m * 32] = pack_bf16(o[m][4 * j + 1] * f.y, o[m][4 * j + 3] * f.y);
        }
      }
    }
  }

  DEVICE void run(int items, int groups) {
    u32 ring = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const int token = item / groups;
      const int blocks = blocks_of(length_of(params, token));
#pragma unroll
      for (u32 m = 0; m < 4; m++) {
#pragma unroll
        for (u32 e = 0; e < 32; e++) o[m][e] = 0.f;
      }
      for (int block = 0; block < blocks; block++) {
        multiply();
        mbarrier_arrive(memory.p_empty(p_slot.slot));
        stage.next();
        p_slot.next();
      }
      store(token, item % groups, ring);
      ring = ring + 1 & 3;
    }
  }
};

// ---- kernel ----------------------------------------------------------------------------------------------------

extern "C" __global__ __launch_bounds__(kThreads, 1) void sparse_mla_prefill(const __grid_constant__ PrefillParams params) {
  extern __shared__ __align__(1024) u8 shared[];
  const Memory memory{opaque(shared_address(shared))};
  const u32 lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5 & 3, 0);
  const u32 role = __shfl_sync(~0u, threadIdx.x >> 7, 0);
  if (threadIdx.x == 0) {
    // Every thread arrives for its own loads and stores. One lane could stand in for its warp after __syncwarp; it was
    // no faster, and a race checker does not follow it.
    for (int i = 0; i < kStages; i++) {
      mbarrier_init(memory.k_full(i), 128);   // producer
      mbarrier_init(memory.k_empty(i), 256);  // values
    }
    mbarrier_init(memory.q_full(), 128);   // producer
    mbarrier_init(memory.q_empty(), 128);  // scores
    for (int i = 0; i < 2; i++) {
      mbarrier_init(memory.p_full(i), 128);   // scores
      mbarrier_init(memory.p_empty(i), 256);  // values
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  const int groups = (params.h_q + kHeads - 1) / kHeads;
  const int items = params.s_q * groups;
  if (role == 3) {
    set_max_registers_down<kProducerRegisters>();
    Producer{params, memory, lane, warp, {}, {}}.run(items, groups);
  } else if (role == 2) {
    set_max_registers_up<kScoreRegisters>();
    Scores{params, memory, lane, warp, {}, {}}.run(items, groups);
  } else {
    set_max_registers_up<kValueRegisters>();
    Values{params, memory, lane, warp, role, {}, {}}.run(items, groups);
  }
}
