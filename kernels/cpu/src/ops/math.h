// exp2, sigmoid, tanh and the gated activations on vectors, to about 1e-7.
#pragma once

// 2^f for |f| <= 1/2 or hardly more: the Taylor polynomial, whose first left-out term is below 1e-8. Exactly 1 at 0.
INLINE vec exp2_fraction(vec f) {
  vec p = vset(1.5252734e-5f);
  p = vfma(p, f, vset(1.5403530e-4f));
  p = vfma(p, f, vset(1.3333558e-3f));
  p = vfma(p, f, vset(9.6181291e-3f));
  p = vfma(p, f, vset(5.5504109e-2f));
  p = vfma(p, f, vset(2.4022651e-1f));
  p = vfma(p, f, vset(6.9314718e-1f));
  return vfma(p, f, vset(1.0f));
}

// 2^x: the nearest whole power times what is left. Exactly 0 at -inf, on which attention's masking relies.
INLINE vec vexp2(vec x) {
  x = vmax(vset(-200.0f), x);
  const vec whole = vround(x);
  return vscale2(exp2_fraction(vsub(x, whole)), whole);
}

constexpr float LOG2_E = 1.44269504f;

// exp(x) with the product x log2(e) carried in two parts, so that the error doesn't grow with x.
INLINE vec vexp(vec x) {
  x = vmax(vset(-150.0f), vmin(vset(150.0f), x));
  const vec whole = vround(vmul(x, vset(LOG2_E)));
  const vec f = vfma(x, vset(1.925963033500e-8f), vfma(x, vset(LOG2_E), vsub(vzero(), whole)));
  return vscale2(exp2_fraction(f), whole);
}

// 1 / (1 + e^-x), 0 where that is too small; 1 + e^-x stays finite for vreciprocal.
INLINE vec vsigmoid(vec x) { return vreciprocal(vadd(vset(1.0f), vexp(vmin(vset(88.0f), vsub(vzero(), x))))); }

// x times a quotient of polynomials in x² (the coefficients are Eigen's), to 3 units in the last place, near 0 too.
INLINE vec vtanh(vec x) {
  x = vmax(vset(-7.9053111f), vmin(vset(7.9053111f), x));
  const vec y = vmul(x, x);
  vec p = vset(-2.76076847742355e-16f);
  p = vfma(p, y, vset(2.00018790482477e-13f));
  p = vfma(p, y, vset(-8.60467152213735e-11f));
  p = vfma(p, y, vset(5.12229709037114e-08f));
  p = vfma(p, y, vset(1.48572235717979e-05f));
  p = vfma(p, y, vset(6.37261928875436e-04f));
  p = vfma(p, y, vset(4.89352455891786e-03f));
  vec q = vset(1.19825839466702e-06f);
  q = vfma(q, y, vset(1.18534705686654e-04f));
  q = vfma(q, y, vset(2.26843463243900e-03f));
  q = vfma(q, y, vset(4.89352518554385e-03f));
  return vdiv(vmul(x, p), q);
}

INLINE vec silu(vec x) { return vmul(x, vsigmoid(x)); }

INLINE vec gelu_tanh(vec x) {  // x/2 (1 + tanh u) = x sigmoid(2u)
  const vec cubed = vmul(vmul(x, x), x);
  const vec u = vmul(vfma(cubed, vset(0.044715f), x), vset(0.79788456f));
  return vmul(x, vsigmoid(vadd(u, u)));
}

INLINE vec gated(vec gate, vec up, int activation) {
  return vmul(activation == SILU_AND_MUL ? silu(gate) : gelu_tanh(gate), up);
}
