// Float queries to FP8, one launch. Compile with -D D_QK=512 or 576 and -D Q_ELEMENT=Bfloat16, Float16 or Float32;
// `backends/sm90_quantize.py` launches it. The definition is `quantize_queries` of quantize.py, and the bytes are the
// same:
//
//   for each row of q (a token t and a head h):
//     largest      = max over the finite x of |x|
//     scale[t, h]  = 1 where largest is 0, else max(largest / 448, 2^-126)      or the scale that was given
//     stored       = e4m3(x / scale)      to nearest even, beyond +-448 (infinities too) +-448, NaN where x is or where
//                                         the scale is not finite and positive
//
// Why this shape of kernel. Reading q and writing a byte an element is all that has to be moved, so a row is read once
// and stays in registers between its maximum and its quotients. 16 bytes a load and D_QK / 64 loads a lane: 8 lanes share
// a row of 16-bit elements, 16 lanes one of float32. Both widths divide evenly that way (with a warp a row, 576
// elements would leave three quarters of the warp idle in every third load), and a maximum takes 3 or 4 shuffles for the
// rows of a whole warp. Rows that do not start at multiples of 16 bytes are read an element a load, a warp a row.
//
// A correctly rounded division costs some fifteen instructions an element, which would take longer than the memory. Its
// divisor is the row's, so what depends on the divisor alone is computed once: see Divisor.
#pragma once

#include "common/ptx.cuh"

struct QuantizeParams {
  const u8* q;              // Q_ELEMENT [s_q, h_q, D_QK], strides below
  const float* given;       // scales to use, one element, [s_q] or [s_q, h_q], strides below; or null
  u8* stored;               // e4m3 [s_q, h_q, D_QK]
  float* scale;             // [s_q, h_q]; null where scales are given
  i64 q_stride_token;       // bytes
  i64 q_stride_head;        // bytes
  u32 rows;                 // s_q h_q
  u32 h_q;
  int given_stride_token;   // elements; 0 where all tokens share a scale
  int given_stride_head;    // elements; 0 where all heads do
};

// An element type: its magnitudes, as unsigned numbers, are in the order of its values. `kInfinityBits` is the first that is
// not finite.
struct Bfloat16 {
  using Bits = u16;
  static constexpr u32 kInfinityBits = 0x7f80;
  static DEVICE float value(u32 bits) { return __uint_as_float(bits << 16); }
};

struct Float16 {
  using Bits = u16;
  static constexpr u32 kInfinityBits = 0x7c00;
  static DEVICE float value(u32 bits) { return float_from_half(static_cast<u16>(bits)); }
};

struct Float32 {
  using Bits = u32;
  static constexpr u32 kInfinityBits = 0x7f800000;
  static DEVICE float value(u32 bits) { return __uint_as_float(bits); }
};

using Element = Q_ELEMENT;
constexpr int kElementBytes = sizeof(Element::Bits);
constexpr bool kPairs = kElementBytes == 2;  // two elements a 32-bit word
constexpr u32 kMagnitude = kPairs ? 0x7fff7fff : 0x7fffffff;

constexpr int kThreads = 256;
constexpr u32 kLanes = 4 * kElementBytes;  // that share a row: D_QK / 64 loads of 16 bytes each
constexpr u32 kWarpRows = 32 / kLanes;
constexpr u32 kRows = kThreads / kLanes;  // a CTA

constexpr float kLargestStored = 448.f;
constexpr float kSmallestScale = 0x1p-126f;

// ---- scale -----------------------------------------------------------------------------------------------------

DEVICE u32 larger(u32 x, u32 y) {
  if constexpr (kPairs) return max_u16x2(x, y);
  return max(x, y);
}

// The magnitudes of a word, 0 in the place of those that are not finite.
DEVICE u32 finite(u32 magnitudes) {
  if constexpr (kPairs) {
    const u32 low = magnitudes & 0xffff, high = magnitudes >> 16;
    return (low < Element::kInfinityBits ? low : 0) | (high < Element::kInfinityBits ? high : 0) << 16;
  }
  return magnitudes < Element::kInfinityBits ? magnitudes : 0;
}

// The largest finite magnitude of a lane's words, as bits of one element.
template <int kWords>
DEVICE u32 largest_of(const u32 (&words)[kWords]) {
  const auto among = [&](auto kept) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < kWords; i++) most = larger(most, kept(words[i] & kMagnitude));
    return kPairs ? max(most & 0xffff, most >> 16) : most;
  };
  const u32 most = among([](u32 magnitudes) { return magnitudes; });
  return most < Element::kInfinityBits ? most : among(finite);
}

// The largest magnitude of the `lanes` lanes that share a row.
template <u32 lanes>
DEVICE float largest_of_row(u32 most) {
#pragma unroll
  for (u32 step = lanes / 2; step > 0; step /= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
  return Element::value(most);
}

DEVICE float scale_of(float largest) {
  return largest == 0.f ? 1.f : fmaxf(__fdiv_rn(largest, kLargestStored), kSmallestScale);
}

// ---- quotients -------------------------------------------------------------------------------------------------

// Quotients by one scale, correctly rounded for as far as e4m3 can tell:
//
//     r = 1 / scale, rounded       e = (1 - r scale) r, what r lacks
//     y = x r + x e                within one unit in the last place of x / scale
//     y + (x - y scale) r          x / scale rounded to nearest, since x - y scale is exact (Markstein)
//
// That holds while nothing leaves the range of float32: x is cut at 512 scale, whose quotient saturates like those of all
// larger x; quotients below 2^-11, where y scale may be subnormal, are stored as zeros; and `usual` bounds the scale.
struct Divisor {
  float scale, reciprocal, rest, cut;

  DEVICE explicit Divisor(float by) : scale(by), reciprocal(__frcp_rn(by)), cut(by * 512.f) {
    rest = __fmaf_rn(-scale, reciprocal, 1.f) * reciprocal;
  }

  static DEVICE bool usual(float scale) { return scale >= 0x1p-90f && scale <= 0x1p100f; }

  DEVICE float divide(float x) const {
    const float magnitude = min_magnitude(x, cut);
    const float y = __fmaf_rn(magnitude, reciprocal, __fmul_rn(magnitude, rest));
    const float quotient = __fmaf_rn(__fmaf_rn(-y, scale, magnitude), reciprocal, y);
    return __uint_as_float(__float_as_uint(quotient) | (__float_as_uint(x) & 0x80000000));
  }
};

// ---- rows ------------------------------------------------------------------------------------------------------

// Element `index` of a lane's words, as a number.
template <int kWords>
DEVICE float element(const u32 (&words)[kWords], int index) {
  if constexpr (kPairs) return Element::value(index & 1 ? words[index / 2] >> 16 : words[index / 2] & 0xffff);
  return Element::value(words[index]);
}

// One row, read by `lanes` lanes of a warp, `width` elements a load: 16 bytes, or one. `lane` counts among them.
template <u32 lanes, u32 width>
DEVICE void quantize_row(const QuantizeParams& params, u32 row, u32 lane) {
  constexpr u32 loads = D_QK / (lanes * width);
  static_assert(loads * lanes * width == D_QK && (width == 1 || width * kElementBytes == 16));
  constexpr u32 words = width == 1 ? loads : loads * 4;
  const u32 token = row / params.h_q, head = row % params.h_q;
  const u8* source = params.q + token * params.q_stride_token + head * params.q_stride_head;
  const auto* elements = reinterpret_cast<const Element::Bits*>(source);
  u32 x[words];
#pragma unroll
  for (u32 i = 0; i < loads; i++) {
    const u32 first = (i * lanes + lane) * width;
    if constexpr (width == 1) {
      x[i] = __ldg(elements + first);
    } else {
      load_global_once(reinterpret_cast<u32(&)[4]>(x[4 * i]), elements + first);
    }
  }

  float scale;
  if (params.given != nullptr) {
    scale = __ldg(params.given + static_cast<i64>(token) * params.given_stride_token + head * params.given_stride_head);
  } else {
    scale = scale_of(largest_of_row<lanes>(largest_of(x)));
    if (lane == 0) params.scale[row] = scale;
  }

  u8* stored = params.stored + static_cast<u64>(row) * D_QK;
  if (!Divisor::usual(scale)) {  // rare: read again, one element at a time
    if (!(scale > 0.f && scale < kInfinity)) scale = kNan;
    for (u32 i = lane; i < D_QK; i += lanes) {
      stored[i] = static_cast<u8>(pack_e4m3(__fdiv_rn(Element::value(elements[i]), scale), 0.f, 0.f, 0.f));
    }
    return;
  }
  const Divisor by(scale);
#pragma unroll
  for (u32 i = 0; i < loads; i++) {
    u8* target = stored + (i * lanes + lane) * width;
    if constexpr (width == 1) {
      *target = static_cast<u8>(pack_e4m3(by.divide(Element::value(x[i])), 0.f, 0.f, 0.f));
    } else {
      u32 packed[width / 4];
#pragma unroll
      for (u32 part = 0; part < width / 4; part++) {
        const int at = i * width + part * 4;
        packed[part] = pack_e4m3(by.divide(element(x, at)), by.divide(element(x, at + 1)),
                                 by.divide(element(x, at + 2)), by.divide(element(x, at + 3)));
      }
      if constexpr (width == 8) {
        *reinterpret_cast<uint2*>(target) = make_uint2(packed[0], packed[1]);
      } else {
        *reinterpret_cast<u32*>(target) = packed[0];
      }
    }
  }
}

// ---- kernel ----------------------------------------------------------------------------------------------------

extern "C" __global__ __launch_bounds__(kThreads) void sparse_mla_quantize(const __grid_constant__ QuantizeParams params) {
  const u32 lane = threadIdx.x & 31;
  const u32 first = blockIdx.x * kRows + (threadIdx.x >> 5) * kWarpRows;  // of the warp
  if (first >= params.rows) return;
  // Lanes past the last row do that row once more: shuffles want all of a warp.
  const u64 starts = reinterpret_cast<u64>(params.q) | params.q_stride_token | params.q_stride_head;
  if ((starts & 15) == 0) {
    quantize_row<kLanes, 16 / kElementBytes>(params, min(first + lane / kLanes, params.rows - 1), lane % kLanes);
  } else {
    for (u32 row = first; row < min(first + kWarpRows, params.rows); row++) quantize_row<32, 1>(params, row, lane);
  }
}
