// One PTX instruction each, wrapped once. The kernels include no CUDA header: NVRTC ships none.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// The same value, whose origin the compiler no longer knows: it stays in a register and is not computed again.
DEVICE u32 opaque(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The same for a pointer.
DEVICE const u8* opaque(const u8* x) {
  asm volatile("" : "+l"(x));
  return x;
}

// threadIdx.x, read where it is used: no register keeps it.
DEVICE u32 thread_index() {
  u32 x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// ---- shared-memory loads and stores by address -----------------------------------------------------------------

DEVICE u32 load_shared_u32(u32 shared) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
  return x;
}

DEVICE u32 load_shared_u8(u32 shared) {
  u32 x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
  return x;
}

DEVICE u64 load_shared_u64(u32 shared) {
  u64 x;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(x) : "r"(shared) : "memory");
  return x;
}

DEVICE float2 load_shared_float2(u32 shared) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(shared) : "memory");
  return x;
}

DEVICE float load_shared_float(u32 shared) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(shared) : "memory");
  return x;
}

DEVICE float4 load_shared_float4(u32 shared) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(shared)
               : "memory");
  return x;
}

DEVICE void store_shared_u16(u32 shared, u32 x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(shared), "h"(static_cast<u16>(x)) : "memory");
}

DEVICE void store_shared_u32(u32 shared, u32 x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}

DEVICE void store_shared_float(u32 shared, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared), "f"(x) : "memory");
}

DEVICE void store_shared_float4(u32 shared, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// ---- mbarriers -------------------------------------------------------------------------------------------------

DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Whether the phase of parity `parity` has completed.
DEVICE bool mbarrier_test(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// Returns once the phase of parity `parity` has completed. A fresh barrier counts its phase 1 as completed.
DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- named barriers and clusters --------------------------------------------------------------------------------

// Barrier `id` of the CTA, for `threads` threads.
DEVICE void barrier_sync(u32 id, u32 threads) { asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// All threads of the cluster that have not exited: what each wrote before is seen by all after.
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address, in shared memory of the cluster, of what lies at `shared` in CTA `rank` of it.
DEVICE u32 cluster_address(u32 shared, u32 rank) {
  u32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

DEVICE float load_cluster_float(u32 address) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

DEVICE float4 load_cluster_float4(u32 address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

// ---- global loads ----------------------------------------------------------------------------------------------

// 16 bytes that nobody else reads, and nobody writes while the kernel runs: they pass the L1 cache by.
DEVICE void load_global_once(u32 (&r)[4], const void* global) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "l"(global));
}

// A load that stays where it is written, of memory that no thread writes meanwhile.
DEVICE u32 load_global_u32(const void* global) {
  u32 x;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(global));
  return x;
}

// ---- global to shared copies -----------------------------------------------------------------------------------

// Copies `bytes` (0 or 16) bytes and fills the rest of the 16 with zeros; with 0 nothing is read.
DEVICE void cp_async_16(u32 shared, const void* global, u32 bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

// The same for 4 bytes (0 or 4 of them).
DEVICE void cp_async_4(u32 shared, const void* global, u32 bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// Asks for a line of global memory to be brought into L2.
DEVICE void prefetch_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` of this thread's committed groups are in flight.
template <int pending>
DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// One arrival on `barrier` when all cp.async of this thread so far have landed. It orders those copies only:
// ordinary stores of the thread need an arrival of their own.
DEVICE void cp_async_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- 8x8 matrix loads and stores -------------------------------------------------------------------------------

DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

DEVICE void stmatrix_x4(u32 shared, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// Stores the transposes of `count` 8x8 matrices of 16-bit elements; lane 8 q + r gives the address of row r of matrix q.
template <int count>
DEVICE void stmatrix_trans(u32 shared, const u32 (&r)[count]) {
  if constexpr (count == 1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(shared), "r"(r[0]) : "memory");
  } else if constexpr (count == 2) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared), "r"(r[0]), "r"(r[1])
                 : "memory");
  } else {
    static_assert(count == 4);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
  }
}

// ---- ordering --------------------------------------------------------------------------------------------------

// Makes this thread's ordinary shared-memory stores visible to wgmma (the async proxy).
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <u32 count>
DEVICE void set_max_registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

template <u32 count>
DEVICE void set_max_registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// ---- arithmetic ------------------------------------------------------------------------------------------------

#define kInfinity __int_as_float(0x7f800000)
#define kNan __int_as_float(0x7fc00000)

DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Byte i of the result is byte (selector >> 4i & 7) of the eight bytes b:a.
DEVICE u32 select_bytes(u32 a, u32 b, u32 selector) {
  u32 y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(selector));
  return y;
}

// Four float32 to four e4m3 bytes, round to nearest even, saturating to 448; x0 in the lowest byte. NaN stays NaN.
DEVICE u32 pack_e4m3(float x0, float x1, float x2, float x3) {
  u16 low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x1), "f"(x0));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x3), "f"(x2));
  return static_cast<u32>(low) | static_cast<u32>(high) << 16;
}

DEVICE float float_from_half(u16 bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}

// The smaller of |x| and |y|; NaN where one of them is.
DEVICE float min_magnitude(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(fabsf(x)), "f"(fabsf(y)));
  return z;
}

// The larger of each of two pairs of 16-bit numbers.
DEVICE u32 max_u16x2(u32 x, u32 y) {
  u32 z;
  asm("max.u16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// Two float32 to a bfloat16 pair, x0 in the low half.
DEVICE u32 pack_bf16(float x0, float x1) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(x1), "f"(x0));
  return y;
}
